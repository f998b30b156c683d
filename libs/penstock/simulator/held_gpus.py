"""Accounting of GPUs that jobs hold and on which they compute, in thousandths; GPUs of a group count once,
while any member holds them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.ledger.derived.groups import others
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.nouns.types import TaskPlacement


@dataclass(slots=True)
class Lease:
    """GPUs of one task, or of all tasks of one rank of a group."""

    milli: int
    counted: int
    """Of these, those that do not count for a later lease."""
    holders: int = 0
    computing: int = 0
    """Number of jobs that compute on them."""
    after: list[tuple["Lease", int]] = field(default_factory=list)
    """Leases of tasks that are being stopped, and how much of each counts for this one."""


@dataclass(slots=True)
class HeldGpus:
    """Counts GPUs from placements and ends in the ledger's order."""

    held: int = 0
    working: int = 0
    """Of these, those on which a job makes progress."""
    _of_task: dict[str, Lease] = field(default_factory=dict)

    def placed(self, state: CellState, fact: PlacementDecided) -> None:
        """Takes a placement after it was folded; the members of a group one after the other."""
        for place in fact.tasks:
            beside = () if fact.group is None else self._beside(state, state.jobs[fact.job_id], place.rank)
            lease = next(iter(beside), None)
            if lease is None:
                lease = self._own(state, state.jobs[fact.job_id], place)
            lease.holders += 1
            self._of_task[place.task_id] = lease

    def _own(self, state: CellState, job: JobState, place: TaskPlacement) -> Lease:
        """A new lease; GPUs that other jobs still hold until they end count for it at once."""
        milli = len(place.gpus) * place.gpu_share_milli
        lease = Lease(milli, milli)
        self.held += milli
        for other_id in job.succession.after:
            for task_id, task in state.jobs[other_id].tasks.items():
                former = self._of_task.get(task_id)
                if former is None or task.place.node_id != place.node_id:
                    continue
                common = len(set(place.gpus) & set(task.place.gpus)) * place.gpu_share_milli
                former.counted -= common
                self.held -= common
                lease.after.append((former, common))
        return lease

    def _beside(self, state: CellState, job: JobState, rank: int) -> Iterator[Lease]:
        """Leases of group members that were placed before."""
        for place in others(state, job, rank):
            if place.task_id in self._of_task:
                yield self._of_task[place.task_id]

    def starts(self, job: JobState) -> None:
        """The job makes progress from now on."""
        for lease in self._held_by(job):
            self.working += 0 if lease.computing else lease.milli
            lease.computing += 1

    def halts(self, job: JobState) -> None:
        """Undoes `starts`, before any of its tasks ends."""
        for lease in self._held_by(job):
            lease.computing -= 1
            self.working -= 0 if lease.computing else lease.milli

    def _held_by(self, job: JobState) -> list[Lease]:
        return [self._of_task[task_id] for task_id in job.tasks if task_id in self._of_task]

    def ends(self, task_id: str) -> None:
        lease = self._of_task.pop(task_id)
        lease.holders -= 1
        if lease.holders:
            return
        self.held -= lease.counted
        for former, common in lease.after:
            if former.holders:
                former.counted += common
                self.held += common
