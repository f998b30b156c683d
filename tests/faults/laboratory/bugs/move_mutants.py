"""Mutants of moves: targets that others get, that leak or are lost, and attempts at two places at once."""

from collections.abc import Iterator
from typing import Any

import msgspec

from penstock.cluster import reasons
from penstock.ledger.fold import evolve_jobs, evolve_moves
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided, StopDecided
from penstock.model.decisions.moves import MoveDecided, MoveGivenUp
from penstock.model.nouns.transitions import JobStatus, TaskStatus
from penstock.scheduling.acting import validate_moves
from penstock_services.placer.core.common import Explain
from penstock_services.placer.core.plans import moves
from penstock_services.placer.core.waiting.retries import Attempts
from tests.faults.laboratory.patching import filtered, mutant, nothing, posing, replace

FAULTS = "move,late,cancel,cordon,gpu"


@mutant("a target is not taken from its nodes", faults=FAULTS)
def _() -> None:
    replace(evolve_moves.keep, lambda node, job: None)
    replace(evolve_moves.let_go, lambda node, job: None)


@mutant("what a task leaves of its own target is free", faults=FAULTS, first=4)
def _() -> None:
    real = evolve_moves.taken

    def taken(job: JobState, node_id: str) -> Iterator[Any]:
        saved = {task_id: task.status for task_id, task in job.tasks.items()}
        for task in job.tasks.values():
            task.status = TaskStatus.RUNNING
        found = list(real(job, node_id))
        for task_id, task in job.tasks.items():
            task.status = saved[task_id]
        yield from found

    replace(real, taken)


@mutant("what a job holds of its own target is taken twice", faults=FAULTS, first=4)
def _() -> None:
    real = evolve_moves.taken

    def taken(job: JobState, node_id: str) -> Iterator[Any]:
        with posing(job, "tasks", {}):
            found = list(real(job, node_id))
        yield from found

    replace(real, taken)


@mutant("a cancelled job keeps its target", faults=FAULTS)
def _() -> None:
    real = evolve_jobs.stop_decided

    def stop_decided(state: CellState, fact: StopDecided) -> None:
        job = state.jobs[fact.job_id]
        with posing(job, "move", None):
            real(state, fact)

    replace(real, stop_decided)


@mutant("a job that was done before its stop keeps its target", faults=FAULTS, first=50)
def _() -> None:
    real = evolve_jobs.job_ended

    def job_ended(state: CellState, fact: JobEnded) -> None:
        state.jobs[fact.job_id].moves = msgspec.structs.replace(state.jobs[fact.job_id].moves, latest=None)
        real(state, fact)

    replace(real, job_ended)


@mutant("a move starts before the old attempt is proven dead", faults=FAULTS)
def _() -> None:
    real = moves.decided

    def decided(state: CellState, proposal: Any, explain: Explain) -> Iterator[Any]:
        yield from real(state, proposal, explain)
        yield from moves.arrive(state, state.jobs[proposal.job_id], explain)

    replace(real, decided)


@mutant("a gang moves when its first task has ended", faults=FAULTS)
def _() -> None:
    real = Attempts.after_exit

    def after_exit(self: Attempts, state: CellState, job: JobState) -> Iterator[Any]:
        if job.target and job.status is JobStatus.STOPPING:
            yield from moves.arrive(state, job, self._explain)
        else:
            yield from real(self, state, job)

    replace(real, after_exit)


@mutant("a moved job queues instead of going to its target", faults=FAULTS)
def _() -> None:
    nothing(moves.arrive)


@mutant("a moved job goes where it was", faults=FAULTS)
def _() -> None:
    real = moves.decided

    def decided(state: CellState, proposal: Any, explain: Explain) -> Iterator[Any]:
        job = state.jobs[proposal.job_id]
        here = [task.place for task in job.tasks.values()]
        for fact in real(state, proposal, explain):
            yield fact
            latest = job.moves.latest
            if isinstance(fact, MoveDecided) and latest is not None and len(here) == len(fact.tasks):
                moved = zip(latest.tasks, here, strict=True)
                for place, old in moved:
                    object.__setattr__(place, "node_id", old.node_id)

    replace(real, decided)


@mutant("a lost target is waited for", faults="move,cordon,gpu,cards,power,late", first=19)
def _() -> None:
    nothing(moves.give_up_lost)
    replace(moves._lost, lambda state, job: "")


@mutant("a job starts on a target that is silent", faults="move,silence,hang,crash,late", first=7)
def _() -> None:
    replace(moves._not_now, lambda state, job: "")


@mutant("every target is given up", faults=FAULTS)
def _() -> None:
    replace(moves._not_now, lambda state, job: "not now")


@mutant("a job that is held moves", faults="move,hold,late", first=4)
def _() -> None:
    replace(
        validate_moves._cannot_move, lambda _state, job: None if job.status is JobStatus.RUNNING else "no"
    )
    nothing(moves.give_up_lost)


@mutant("a job moves to cores and GPUs that others have", faults=FAULTS, first=1)
def _() -> None:
    real = validate_moves._without

    def without(state: CellState, job: JobState, nodes: Any) -> Any:
        then = real(state, job, nodes)
        for node in [state.nodes[node_id] for node_id in dict.fromkeys(nodes) if node_id in state.nodes]:
            for task_id, job_id in node.tasks.items():
                if job_id != job.job_id:
                    then.release_places([state.jobs[job_id].tasks[task_id].place])
        return then

    replace(real, without)


@mutant("a move is decided and the job is not stopped", faults=FAULTS)
def _() -> None:
    filtered(moves.decided, lambda fact: not isinstance(fact, StopDecided))


@mutant("a move goes to a node out of use", faults="move,cordon,late", first=4)
def _() -> None:
    real = reasons.why_not

    def lacking(state: CellState, node: Any, need: Any, gpu_models: Any) -> str:
        with posing(node, "cordon", None):
            return real(state, node, need, gpu_models)

    replace(real, lacking)
    replace(moves._unusable, lambda state, place: "")


@mutant("a target is given up without a fact", faults="move,cordon,gpu,late")
def _() -> None:
    filtered(moves.arrive, lambda fact: not isinstance(fact, MoveGivenUp | PlacementDecided))
