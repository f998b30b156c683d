"""Mutants of checkpoints: starts at what is not there, fetches by the wrong node, work that is counted twice,
and fetches that never end."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from penstock.ledger.derived import resuming
from penstock.ledger.fold import evolve_jobs, evolve_tasks
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobRequeued
from penstock.model.inputs.external_events import TaskCheckpointed
from penstock_services.node_reporter.shell.task_setup.fetches import Fetches
from penstock_services.placer.core import orders
from tests.faults.laboratory.patching import mutant, replace

FAULTS = "save,move,crash,late"


@mutant("a start names a checkpoint that is on another node, and not where", faults=FAULTS)
def _() -> None:
    replace(orders._source, lambda state, job: None)


@mutant("a gang goes on at a checkpoint that one of its nodes has", faults=FAULTS, first=1)
def _() -> None:
    def resumed(state: CellState, job: JobState) -> Any:
        found = job.saving.checkpoint
        return found if found is not None and found.path else None

    replace(resuming.resumed, resumed)


@mutant("a checkpoint is handed over to whoever has it", faults=FAULTS)
def _() -> None:
    real = orders._hand_over

    def hand_over(state: CellState, job: JobState) -> Iterator[Any]:
        for order in real(state, job):
            yield structs.replace(order, to_node=order.node_id)

    replace(real, hand_over)


@mutant("a checkpoint is handed over with the old node's key", faults=FAULTS)
def _() -> None:
    real = orders._hand_over

    def hand_over(state: CellState, job: JobState) -> Iterator[Any]:
        for order in real(state, job):
            yield structs.replace(order, public_key=state.nodes[order.node_id].public_key)

    replace(real, hand_over)


@mutant("what could not be fetched counts as kept", faults=FAULTS, first=4)
def _() -> None:
    replace(evolve_jobs.begin_at_0, lambda job: None)


@mutant("the first checkpoint of a job is the one that is carried on", faults=FAULTS, first=4)
def _() -> None:
    real = evolve_tasks.task_checkpointed

    def task_checkpointed(state: CellState, fact: TaskCheckpointed) -> None:
        job = evolve_tasks.job_of_task(state, fact.node_id, fact.task_id)
        before = None if job is None else job.saving.checkpoint
        real(state, fact)
        if job is not None and before is not None:
            job.saving = msgspec.structs.replace(job.saving, checkpoint=before)

    replace(real, task_checkpointed)


@mutant("kept work is added again at each end", faults=FAULTS, first=1)
def _() -> None:
    real = evolve_jobs.job_requeued

    def job_requeued(state: CellState, fact: JobRequeued) -> None:
        job = state.jobs[fact.job_id]
        before = job.saving.kept_ms
        real(state, fact)
        job.saving = msgspec.structs.replace(job.saving, kept_ms=job.saving.kept_ms + before)

    replace(real, job_requeued)


@mutant("a task that is stopped while it fetches is forgotten", faults=FAULTS + ",cancel", first=47)
def _() -> None:
    def ended(self: Fetches, order: Any, key: Any, task: Any) -> None:
        self._stopped.discard(key)
        real(self, order, key, task)

    real = Fetches._ended
    replace(real, ended)
