"""A proposer of adjustments: cores and memory bandwidth of running tasks, asked for on a view of the cell
that may be out of date."""

from typing import Any, get_args

from penstock.ledger.state.job.job_state import TaskState
from penstock.ledger.state.state import CellState
from penstock.log.port import Message
from penstock.model.decisions.adjustments import AdjustmentCause
from penstock.model.nouns.transitions import TaskStatus
from penstock.model.proposals import CoresProposed, ThrottleProposed
from tests.faults.laboratory.inputs.wire import message, orders_of
from tests.faults.laboratory.machines.log import Broker
from tests.faults.laboratory.world import World

NAME = "contention-guard"
REASON = "it waits for its loader"
MAX_CHANGES = 6  # at once, on one node
STALE_AFTER_S = 20.0
LIFTED = 0.3  # of the caps
OPERATOR = "ada"  # asks for every other change that has no cause: an operator may slow trainings

CAUSES = get_args(AdjustmentCause)


class Adjuster:
    """Looks at one node, asks for changes of what runs there: shrinks, and growths into the room that these
    leave. `named`: each with a cause, as a contention-guard that errs would."""

    def __init__(self, world: World, broker: Broker, *, named: bool = False) -> None:
        self._named = named
        self._world = world
        self._broker = broker
        self._asked = 0

    def adjust(self, state: CellState, node_id: str) -> None:
        """Nothing, where nothing runs. `state` is only read now; what is asked for lands later, not always in
        this order."""
        tasks = [
            task
            for job in state.jobs.values()
            for task in job.tasks.values()
            if task.place.node_id == node_id and task.status in (TaskStatus.RUNNING, TaskStatus.STOPPING)
        ]
        for _ in range(int(self._world.rng.integers(1, MAX_CHANGES + 1)) if tasks else 0):
            self._ask(tasks[int(self._world.rng.integers(len(tasks)))], state)

    def _ask(self, task: TaskState, state: CellState) -> None:
        rng, world = self._world.rng, self._world
        self._asked += 1
        about: dict[str, Any] = {
            "proposal_id": f"a{self._asked}",
            "proposer": NAME,
            "task_id": task.place.task_id,
            "reason": REASON,
        }
        if self._named:
            about["cause"] = CAUSES[int(rng.integers(len(CAUSES)))]
        elif self._asked % 2:
            about["by"] = OPERATOR
        proposal: CoresProposed | ThrottleProposed
        if rng.random() < 0.3:
            percent = None if rng.random() < LIFTED else int(rng.integers(1, 101))
            proposal = ThrottleProposed(**about, memory_bandwidth_percent=percent)
        else:
            free = state.nodes[task.place.node_id].free_core_mask.bit_count()
            most = len(task.place.cores) + free + 1
            proposal = CoresProposed(**about, cores=int(rng.integers(1, most + 1)))
        found = message(proposal, f"{NAME}/{self._asked}", f"/penstock/{NAME}")
        after_s = world.within(0, STALE_AFTER_S) if rng.random() < 0.2 else world.delay_s()
        world.at(after_s, lambda: self._broker.put([found]))

    def again(self, node_id: str) -> None:
        """An order of long ago comes once more: what it asks may be the opposite of what was decided
        since."""
        orders = [
            record
            for record in self._broker.records(orders_of(node_id))
            if dict(record.headers).get("ce_type", b"").startswith(b"penstock.order.set_")
        ]
        if orders:
            record = orders[int(self._world.rng.integers(len(orders)))]
            self._broker.put([Message(record.partition, record.value, record.headers, record.key)])
