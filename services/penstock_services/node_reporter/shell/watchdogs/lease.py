"""Lease of this node's tasks: they run only as long as the node reaches the log (decision 40).

*Contact* is a time of the boot-time clock at which the log held no probe that this node has not answered.
Until contact plus its lease a task may run; then its shim ends it, with or without a reporter. The reporter
renews: when a third of the shortest lease has passed it queries the log for the end of the orders, and
contact is the time of the query. A node without tasks queries nothing; a later start waits for the answer to
one query.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator

from penstock.backoff import retry
from penstock.clock import boot_s
from penstock.errors import LogError, PenstockError
from penstock.log.port import Log, Partition
from penstock.model.decisions.orders import ProbeNode, StartTask
from penstock_services.node_reporter.core.state import NodeState, Status, Task
from penstock_services.node_reporter.shell.ports import Host, Key

ASK_AFTER = 1 / 3  # of the lease, since contact
STOP_AFTER = 5 / 6  # of the lease: then tasks get SIGTERM, and the rest of the lease to save their work
MIN_PAUSE_S = 0.01  # the event loop's timers use another clock
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 5.0

logger = logging.getLogger(__name__)


class LeaseLapsed(PenstockError):
    """The log was out of reach for so long that the cell may take this node's tasks for dead:
    they have to end."""


def concerns(state: NodeState, order: ProbeNode) -> bool:
    """Whether a probe is of this joining; a probe of an earlier one is answered already."""
    return order.node_id == state.node_id and order.incarnation == state.incarnation


class Lease:
    """Of one session. `spawn` begins a task that had to wait for contact."""

    def __init__(
        self,
        state: NodeState,
        host: Host,
        log: Log,
        orders: Partition,
        joined: asyncio.Event,
        spawn: Callable[[StartTask], None],
    ) -> None:
        self._state = state
        self._host = host
        self._log = log
        self._orders = orders
        self._joined = joined
        self._spawn = spawn
        self._contact_s = host.contact()
        self._position = -1
        self._moved = asyncio.Event()
        self._asleep_s = 0.0
        """While `keep` sleeps, s: a task with a shorter lease has to wake it."""
        self._held: dict[Key, StartTask] = {}

    def until_s(self, order: StartTask) -> float | None:
        """End of this task's lease, by the boot-time clock; None: never."""
        return (
            self._contact_s + order.lease_ms / 1_000
            if order.lease_ms and self._contact_s is not None
            else None
        )

    def holds(self, order: StartTask | None, for_s: float = 0.0) -> bool:
        """Whether the task may run now, and for so much longer."""
        until_s = None if order is None else self.until_s(order)
        return order is None or not order.lease_ms or (until_s is not None and boot_s() + for_s < until_s)

    def admits(self, order: StartTask) -> bool:
        """Whether a task may begin now; if not, `spawn` begins it after the next contact.

        It begins only while the lease need not be renewed yet: so there is time to renew it before tasks are
        stopped.
        """
        if self.holds(order, (1 - ASK_AFTER) * order.lease_ms / 1_000):
            return True
        self._held[order.task_id, order.token] = order
        self.wake()
        return False

    def give_up(self) -> list[Key]:
        """Tasks that have not begun, and must not any more: the cell may take them for dead."""
        begun = {task.task_id for task in self._begun()}
        idle = (task for task in self._leased() if task.task_id not in begun)
        lapsed = [(task.task_id, task.token) for task in idle if not self.holds(task.order)]
        for key in lapsed:
            self._held.pop(key, None)
        return lapsed

    def give_up_held(self) -> list[Key]:
        """Tasks that wait for contact; none of them begins any more."""
        held, self._held = self._held, {}
        return list(held)

    def lapsed(self) -> bool:
        """Whether a task that has begun must not run any more."""
        return any(not self.holds(task.order) for task in self._begun())

    def taken(self, position: int) -> None:
        """All orders before this offset are processed."""
        self._position = position
        if not self._asleep_s:
            self.wake()

    def changed(self, task: Task) -> None:
        """A task has changed; most have the same lease as the tasks before,
        for which `keep` will wake in time."""
        if 0 < length_s(task) < self._asleep_s:
            self.wake()

    def wake(self) -> None:
        """Tasks, the position, or the joining have changed."""
        self._moved.set()

    async def keep(self) -> None:
        """Renews the lease while it is needed. Raises `LeaseLapsed`, while there is still time to stop tasks
        with their grace."""
        while True:
            self._moved.clear()
            lease_s = shortest_s(self._leased())
            if lease_s is None:
                self._asleep_s = math.inf
                await self._moved.wait()
                continue
            now_s = boot_s()
            contact_s = -math.inf if self._contact_s is None else self._contact_s
            ask_s = contact_s + ASK_AFTER * lease_s
            if not self._held and ask_s > now_s:
                self._asleep_s = lease_s
                await self._changed(max(MIN_PAUSE_S, ask_s - now_s))
                continue
            self._asleep_s = 0.0
            running_s = shortest_s(self._begun())
            left_s = None if running_s is None else max(0.0, contact_s + STOP_AFTER * running_s - now_s)
            try:
                async with asyncio.timeout(left_s):
                    await self._renew()
            except TimeoutError as error:
                raise LeaseLapsed(f"the log was out of reach for {STOP_AFTER:.0%} of a lease") from error

    async def _renew(self) -> None:
        asked_s, end = await retry(self._ask, (LogError,), first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S)
        while self._position < end or not self._joined.is_set():
            self._moved.clear()
            await self._moved.wait()
        if self.lapsed():  # the answer to a probe may have come too late
            raise LeaseLapsed("the log was reached again after the lease")
        self._contact_s = asked_s
        self._host.renew(asked_s, max((length_s(task) for task in self._leased()), default=0.0))
        held, self._held = self._held, {}
        for order in held.values():
            self._spawn(order)

    async def _ask(self) -> tuple[float, int]:
        """(time of the query, end of the orders, which is no earlier than that time)."""
        asked_s = boot_s()
        return asked_s, (await self._log.end_offsets([self._orders]))[self._orders]

    async def _changed(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._moved.wait()
        except TimeoutError:
            pass

    def _leased(self) -> Iterator[Task]:
        return (task for task in self._state.tasks.values() if task.order is not None and task.order.lease_ms)

    def _begun(self) -> Iterator[Task]:
        return (
            task
            for task in self._leased()
            if (task.task_id, task.token) not in self._held and task.status is not Status.WAITING
        )


def shortest_s(tasks: Iterable[Task]) -> float | None:
    """The shortest of their leases, s; None: there is none."""
    return min(map(length_s, tasks), default=None)


def length_s(task: Task) -> float:
    """0: none."""
    return 0.0 if task.order is None else task.order.lease_ms / 1_000
