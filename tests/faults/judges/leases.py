"""A node's lease beside a log that is slow, out of reach, or full of probes that the node has not read yet.

Rule `lease`: contact is the time at which the log was asked, and counts once all orders up to there were
read; a lease that is over is not renewed; no task begins after its lease; and what waits too long is given
up.
"""

import asyncio
from collections.abc import Iterable

import numpy as np

from penstock.clock import boot_s
from penstock.errors import LogError
from penstock.log.port import Partition
from penstock.model.decisions.orders import StartTask
from penstock.model.schema.topics import Topic
from penstock_services.node_reporter.core.state import NodeState, Status, Task
from penstock_services.node_reporter.shell.watchdogs.lease import Lease, LeaseLapsed
from tests.faults.judges.cell_rules import Broken
from tests.support.node_reporter.node_cell import start_order
from tests.support.virtual_time import run_virtually

ORDERS = Partition(Topic.ORDERS, 0)
LEASES_MS = (20_000, 60_000)
STEPS = 40
MAX_TURNS = 20_000  # of the event loop; a sound run takes a thousand


class Node:
    """Log and host in one: what the lease asks, and what it is told."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.end = self.taken = 0
        self.down_until_s = 0.0
        self.asked_s: float | None = None
        self.answered = 0
        self.contact_s: float | None = None
        self.state = NodeState("n1", "b1", ())
        self.begun: dict[str, StartTask] = {}
        self.joined = asyncio.Event()
        self.joined.set()
        self.lease = Lease(self.state, self, self, ORDERS, self.joined, self._spawn)  # type: ignore[arg-type]

    def contact(self) -> float | None:
        return None

    async def end_offsets(self, places: Iterable[Partition]) -> dict[Partition, int]:
        asked_s = boot_s()
        end = self.end
        await asyncio.sleep(float(self.rng.exponential(2.0)))  # clock: virtual time passes
        if asked_s < self.down_until_s:
            raise LogError("the log is out of reach")
        self.asked_s, self.answered = asked_s, end
        return dict.fromkeys(places, end)

    def renew(self, contact_s: float, lease_s: float) -> None:
        """What the node writes down, and shims read."""
        if self.asked_s is None or contact_s > self.asked_s:
            raise Broken(f"lease: contact at {contact_s:g} s, and the log was asked at {self.asked_s}")
        if self.taken < self.answered:
            raise Broken(f"lease: contact, and of {self.answered} orders {self.taken} are read")
        for order in self.begun.values():
            if self._over(order):
                raise Broken(f"lease: it is renewed, and that of {order.task_id} was over")
        self.contact_s = contact_s

    def _over(self, order: StartTask) -> bool:
        return self.contact_s is None or boot_s() >= self.contact_s + order.lease_ms / 1_000

    def _spawn(self, order: StartTask) -> None:
        """A shim begins nothing whose lease is over, and says so."""
        if self._over(order):
            del self.state.tasks[order.task_id]
        else:
            self.begun[order.task_id] = order

    # ------------------------------------------------------------------------------------- what happens

    def orders(self, number: int) -> None:
        """A task is ordered here, with a lease; it may have to wait for its predecessor."""
        lease_ms = int(self.rng.integers(*LEASES_MS))
        order = start_order(number + 1, task_id=f"job-{number}.1.w0", lease_ms=lease_ms)
        waits = bool(self.rng.random() < 0.3)
        task = Task(
            order.task_id, order.token, "b1", Status.WAITING if waits else Status.STARTING, order=order
        )
        self.state.tasks[order.task_id] = task
        self.lease.changed(task)
        if not waits and self.lease.admits(order):
            if self._over(order):
                raise Broken(f"lease: {order.task_id} may begin after its lease")
            self._spawn(order)

    def gives_up(self) -> None:
        """As before each answer to a probe: what has not begun must not, once its lease is over."""
        late = {
            task.task_id
            for task in self.state.tasks.values()
            if task.task_id not in self.begun and task.order is not None and self._over(task.order)
        }
        found = {task_id for task_id, _ in self.lease.give_up()}
        if found != late:
            raise Broken(f"lease: given up are {sorted(found)}, over are {sorted(late)}")
        for task_id in found:
            del self.state.tasks[task_id]

    async def play(self) -> None:
        """Raises `Broken`, `LeaseLapsed`."""
        for step in range(STEPS):
            kind = int(self.rng.integers(5))
            if kind == 0:
                self.orders(step)
            elif kind == 1:
                self.end += 1
            elif kind == 2:
                self.taken = self.end
                self.lease.taken(self.taken)
            elif kind == 3 and self.rng.random() < 0.3:
                self.down_until_s = boot_s() + float(self.rng.uniform(1, 80))
            elif kind == 4 and self.contact_s is not None and self.rng.random() < 0.5:
                self.gives_up()
            await asyncio.sleep(float(self.rng.exponential(4.0)))  # clock: virtual time passes


async def _play(seed: int) -> None:
    node = Node(seed)
    await asyncio.sleep(100)  # clock: virtual time passes
    keeping = asyncio.create_task(node.lease.keep())
    playing = asyncio.create_task(node.play())
    await asyncio.wait({keeping, playing}, return_when=asyncio.FIRST_COMPLETED)
    for task in (keeping, playing):
        task.cancel()
    for error in await asyncio.gather(keeping, playing, return_exceptions=True):
        if isinstance(error, Exception) and not isinstance(error, LeaseLapsed):
            raise error
    if any(isinstance(task.exception(), LeaseLapsed) for task in (keeping,) if not task.cancelled()):
        node.gives_up()


def play(seed: int) -> None:
    """Raises `Broken`."""
    run_virtually(_play(seed), max_turns=MAX_TURNS)
