"""Mutants of ledger, policies and the placer's core."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from penstock.cluster import capacity, view
from penstock.ledger.fold import evolve, evolve_jobs, evolve_nodes
from penstock.ledger.record import record
from penstock.ledger.record.record import Head
from penstock.ledger.replica import snapshot
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.index import Share
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import (
    JobEnded,
    JobRequeued,
    PlacementDecided,
    StopDecided,
    TimerSet,
)
from penstock.model.inputs.external_events import RunningTask
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.nouns.types import WHOLE_GPU
from penstock_services.placer.core import common, guard
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.members.membership import Membership
from penstock_services.placer.core.waiting.retries import Attempts
from tests.faults.laboratory.patching import (
    Function,
    accepting,
    cut_before,
    filtered,
    mutant,
    nothing,
    posing,
    replace,
)

# --------------------------------------------------------------------------------- the chain: what counts at
# all


@mutant("a record need not name its parent", faults="stranger")
def _() -> None:
    real = record.extend
    replace(real, lambda head, found, value: real(Head(head.seq, found.parent, head.term), found, value))


@mutant("a record need not be the next one", faults="stranger")
def _() -> None:
    real = record.extend
    replace(real, lambda head, found, value: real(Head(found.seq - 1, head.id, head.term), found, value))


@mutant("a record of an older term counts", faults="stranger")
def _() -> None:
    real = record.extend
    replace(
        real,
        lambda head, found, value: real(head, structs.replace(found, term=max(head.term, found.term)), value),
    )


@mutant("void records are folded")
def _() -> None:
    real = Replica.take

    def take(self: Replica, value: bytes, offset: int, hook: Any = None) -> Any:
        found = real(self, value, offset, hook)
        if found is None:
            evolve.fold(self.state, record.read(value))
        return found

    replace(real, take)


# ------------------------------------------------------------------------------------------ guards of the
# placer


@mutant("a task's event under an older token counts", faults="garbage", first=3)
def _() -> None:
    accepting(guard._of_living_task, "stale_token")


@mutant("a task may start twice")
def _() -> None:
    accepting(guard._started, "duplicate_start")


@mutant("a job may be submitted twice")
def _() -> None:
    accepting(guard._submitted, "duplicate_job")


@mutant("an ended job may be submitted again", first=8)
def _() -> None:
    real = guard._submitted
    replace(real, lambda state, event: None if event.job_id in state.ended else real(state, event))


@mutant("a second estimate queues the job again", first=2)
def _() -> None:
    accepting(guard._estimated, "duplicate_estimate")


@mutant("late copies of joinings count", faults="duplicate", first=6)
def _() -> None:
    accepting(guard._joined, "stale_join")


@mutant("an older boot's departure counts", faults="power,vanish,twice,late", first=19)
def _() -> None:
    accepting(guard._left, "older_boot")


@mutant("an exit under the token of its stop is stale", faults="overtake", log="kafka")
def _() -> None:
    replace(guard._is_a_stop, lambda job, token: False)


@mutant("a cancelled job may be cancelled again", faults="cancel,twice")
def _() -> None:
    accepting(guard._cancel, "already_stopping")


# ----------------------------------------------------------------------------------------------------
# decisions


@mutant("retries know no bound", first=1)
def _() -> None:
    real = Attempts._failed

    def failed(self: Attempts, state: CellState, job: Any) -> Iterator[Any]:
        for found in real(self, state, job):
            if found.TYPE == JobEnded.TYPE:
                yield self._requeue(state, job, "failed", 0)
                yield common.timer(state, job.job_id, "backoff", 0, job.attempt)
            else:
                yield found

    replace(real, failed)


@mutant("one retry too few", first=1)
def _() -> None:
    real = Attempts._failed

    def failed(self: Attempts, state: CellState, job: Any) -> Iterator[Any]:
        for found in real(self, state, job):
            used = job.attempt - job.retries.infrastructure
            retried = isinstance(found, JobRequeued) and found.reason == "failed"
            if retried and used + 1 >= job.spec.retry.max_attempts:
                yield JobEnded(job_id=job.job_id, outcome="failed", exit_code=1, reason="too early")
                return
            yield found

    replace(real, failed)


@mutant("lost attempts cost the user his own")
def _() -> None:
    real = evolve_jobs.job_requeued

    def requeued(state: CellState, fact: Any) -> None:
        job = state.jobs[fact.job_id]
        before = job.retries.infrastructure
        real(state, fact)
        job.retries = msgspec.structs.replace(job.retries, infrastructure=before)

    replace(real, requeued)


@mutant("the cell never freezes", faults="vanish")
def _() -> None:
    real = Membership._missing

    def missing(self: Membership, state: CellState) -> tuple[int, int]:
        found, of = real(self, state)
        return (found if state.frozen else 0), of

    replace(real, missing)


@mutant("the cell never thaws")
def _() -> None:
    nothing(Membership.thaw)


@mutant("a frozen cell places", faults="vanish")
def _() -> None:
    _while_not_frozen(Decider._place_waiting)


@mutant("a frozen cell gives up nodes", faults="vanish")
def _() -> None:
    _while_not_frozen(Decider._left)


def _while_not_frozen(real: Function) -> None:
    def broken(self: Decider, state: CellState, *given: Any, **named: Any) -> Iterator[Any]:
        with posing(state, "frozen", ""):
            yield from real(self, state, *given, **named)

    replace(real, broken)


@mutant("what a joining node does not name lives on", faults="disk", first=6)
def _() -> None:
    real = Decider._joined

    def joined(self: Decider, state: CellState, event: Any) -> Iterator[Any]:
        tasks = tuple(
            RunningTask(task_id=task_id, token=1) for task_id in state.nodes[event.node.node_id].tasks
        )
        return real(self, state, structs.replace(event, tasks=tasks))

    replace(real, joined)


@mutant("the rest of a broken gang runs on", first=11)
def _() -> None:
    filtered(Attempts.after_exit, lambda fact: getattr(fact, "reason", "") != "gang_member_failed")


@mutant("a completed gang's parameter servers run on")
def _() -> None:
    filtered(Attempts.after_exit, lambda fact: fact.TYPE != StopDecided.TYPE or fact.reason != "completed")


@mutant("a gang is judged before all have ended")
def _() -> None:
    real = Attempts.after_exit

    def after_exit(self: Attempts, state: CellState, job: Any) -> Iterator[Any]:
        stopping = job.status is JobStatus.STOPPING
        return self._stopped(state, job) if stopping else real(self, state, job)

    replace(real, after_exit)


@mutant("a stopped gang is forgotten", first=10)
def _() -> None:
    nothing(Attempts._stopped)


@mutant("a run time-out is never set")
def _() -> None:
    filtered(Decider._started, lambda fact: fact.TYPE != TimerSet.TYPE)


@mutant("nobody is tried when something is freed")
def _() -> None:
    cut_before(Decider._exited, lambda fact: fact.TYPE == PlacementDecided.TYPE)


@mutant("back-off never ends", faults="hold", jobs=12, nodes=3)
def _() -> None:
    _ignoring_timers("backoff")


@mutant("a run time-out stops nobody")
def _() -> None:
    _ignoring_timers("run_timeout")


def _ignoring_timers(kind: str) -> None:
    real = Decider._fired

    def fired(self: Decider, state: CellState, event: Any) -> Iterator[Any]:
        return iter(()) if event.timer_id.endswith(f":{kind}") else real(self, state, event)

    replace(real, fired)


# ------------------------------------------------------------------------------------------------------ the
# fold


@mutant("resources of the dead are not freed")
def _() -> None:
    replace(NodeState.take_back, lambda self, place: None)


@mutant("resources are freed when the stop is decided")
def _() -> None:
    real = evolve_jobs.stop_decided

    def stop_decided(state: CellState, fact: Any) -> None:
        real(state, fact)
        for task in state.jobs[fact.job_id].tasks.values():
            if task.status is TaskStatus.STOPPING:
                state.nodes[task.place.node_id].take_back(task.place)

    replace(real, stop_decided)


@mutant("the index of nodes lags behind")
def _() -> None:
    real = evolve_jobs.placement_decided

    def placement_decided(state: CellState, fact: Any) -> None:
        with posing(CellState, "rebook", lambda self, node: None):
            real(state, fact)

    replace(real, placement_decided)


@mutant("a suspect node is still used", first=3)
def _() -> None:
    for real in (NodeState.free, NodeState.sound_gpus):
        replace(real, _as_ready(real))


def _as_ready(real: Function) -> Function:
    def broken(self: NodeState) -> Any:
        suspect = self.status is NodeStatus.SUSPECT
        with posing(self, "status", NodeStatus.READY if suspect else self.status):
            return real(self)

    return broken


@mutant("a cordoned node is still used", faults="cordon")
def _() -> None:
    for real in (NodeState.free, NodeState.sound_gpus):
        replace(real, _uncordoned(real))


def _uncordoned(real: Function) -> Function:
    def broken(self: NodeState) -> Any:
        with posing(self, "cordon", None):
            return real(self)

    return broken


@mutant("a joining ends a cordon", faults="cordon,reboot,upgrade", first=5)
def _() -> None:
    real = evolve_nodes.node_joined

    def joined(state: CellState, fact: Any) -> None:
        real(state, fact)
        node = state.nodes[fact.node.node_id]
        node.cordon = None
        state.index.cordoned &= ~node.bit
        state.reindex(node)

    replace(real, joined)


@mutant("a drain stops no task", faults="cordon")
def _() -> None:
    nothing(Membership.drain)


@mutant("a faulted GPU is still counted", faults="gpu")
def _() -> None:
    real = NodeState.free

    def free(self: NodeState) -> Any:
        with posing(self, "faulted_gpu_mask", 0):
            return real(self)

    replace(real, free)


@mutant("no answer reports to a node that its joining is stale", faults="disk,clock", first=28)
def _() -> None:
    replace(guard.join_refusal, lambda state, event, reason: None)


@mutant("a joining repairs GPUs", faults="gpu,crash")
def _() -> None:
    real = evolve_nodes.node_joined
    replace(real, lambda state, fact: real(state, structs.replace(fact, faults=())))


@mutant("slots are NVML's indexes", faults="cards")
def _() -> None:
    replace(evolve_nodes.bound_slots, lambda before, held, found: ())


@mutant("a share frees its whole GPU")
def _() -> None:
    real = NodeState.take_back

    def take_back(self: NodeState, place: Any) -> None:
        for gpu in place.gpus:
            left = self.shared.get(gpu)
            if left is not None and left.milli + place.gpu_share_milli >= WHOLE_GPU // 2:
                self.shared[gpu] = Share(WHOLE_GPU - place.gpu_share_milli, left.memory_mib)
        real(self, place)

    replace(real, take_back)


@mutant("timers are lost with a snapshot", faults="steps,rival", first=9)
def _() -> None:
    real = snapshot.load

    def load(value: bytes) -> CellState:
        state = real(value)
        state.timer_heap = []
        return state

    replace(real, load)


@mutant("timers of ended jobs stay")
def _() -> None:
    real = evolve_jobs.job_ended

    def job_ended(state: CellState, fact: Any) -> None:
        before = dict(state.timers)
        real(state, fact)
        state.timers.update(before)

    replace(real, job_ended)


@mutant("half of a gang is placed")
def _() -> None:
    real = view.assign

    def assign(*given: Any) -> PlacementDecided:
        found = real(*given)
        return PlacementDecided(job_id=found.job_id, attempt=found.attempt, tasks=found.tasks[:2])

    replace(real, assign)


@mutant("two tasks of a gang get the same GPUs")
def _() -> None:
    real = view.assign

    def assign(*given: Any) -> PlacementDecided:
        found = real(*given)
        first = found.tasks[0]
        twins = (
            structs.replace(place, gpus=first.gpus)
            if (place.node_id, len(place.gpus)) == (first.node_id, len(first.gpus))
            else place
            for place in found.tasks
        )
        return PlacementDecided(job_id=found.job_id, attempt=found.attempt, tasks=tuple(twins))

    replace(real, assign)


@mutant("nodes that are gone count as capacity", faults="power", first=2)
def _() -> None:
    real = capacity.shortfall

    def shortfall(index: Any, demand: Any) -> Any:
        with posing(index, "gone", 0):
            return real(index, demand)

    replace(real, shortfall)


@mutant("a proposal may take what is not free", faults="propose", first=2)
def _() -> None:
    real = view.ClusterView._task

    def task(self: view.ClusterView, job: Any, demand: Any, rank: int, node_id: str) -> Any:
        state = self.state
        if node_id in state.nodes and state.nodes[node_id].ordinal not in self._nodes:
            node = self._own(state.nodes[node_id])
            for task_id, job_id in node.tasks.items():
                node.take_back(state.jobs[job_id].tasks[task_id].place)
        return real(self, job, demand, rank, node_id)

    replace(real, task)
