"""Incremental index of jobs: sorted rows of interchangeable jobs, so that a plan examines only jobs whose
decision may change.

While a job waits, or runs, and reports nothing, its key does not change. So the rows are cached between plans
and updated with the jobs in `CellState.change_log`, and rows of running jobs with those in `progress_log`,
too. Their content is a function of the state alone: a new policy object, or one that is given another state,
builds the same rows from scratch.

Within one plan free capacity only shrinks. So when one waiting job of a row does not fit, no job behind it in
that row does, and the whole row is skipped: a plan costs O(rows), however many jobs wait.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Generic, TypeVar

from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.transitions import JobStatus

Row = TypeVar("Row", bound=tuple[object, ...])
Entry = tuple[float, int, str, Row]
"""(key, order, job id, row); no two entries are equal in the first two fields."""
CONTENDING = HOLDING - {JobStatus.STOPPING}
QUEUES_AGAIN = frozenset({"preempted", "migrated", "drained"})
"""Reasons of stops after which the job waits at its old position."""
NOT_LISTED = frozenset(JobStatus) - {JobStatus.QUEUED}
"""Status of jobs that are in no row of waiting jobs."""


class Changes:
    """The jobs that have changed since the last call. `progress`: also jobs that hold resources and of which
    only the progress changed."""

    def __init__(self, *, progress: bool = False) -> None:
        self._state: CellState | None = None
        self._progress = progress
        self._read = self._read_progress = 0

    def ids(self, state: CellState) -> tuple[list[str], bool]:
        """(ids, whether these are all jobs that wait or hold resources: then cached values of other jobs are
        void)."""
        known, log, progress_log = state is self._state, state.change_log, state.progress_log
        changed = log.since(self._read) if known else None
        progress = progress_log.since(self._read_progress) if known and self._progress else []
        self._state, self._read, self._read_progress = state, log.count, progress_log.count
        if changed is not None and progress is not None:
            return [*changed, *progress] if progress else changed, False
        return [*state.queue.values(), *(job.job_id for job in state.holding.values())], True


class JobRows(Generic[Row]):
    """The cached rows. A place is (row, key in it); jobs of one row must be interchangeable except for their
    keys.

    `waits` gives the place of jobs in the queue, `runs` of those that hold resources and are not being
    stopped; None, or the result None: the job is in no row.
    """

    def __init__(
        self,
        waits: Callable[[CellState, JobState], tuple[Row, float] | None] | None = None,
        runs: Callable[[CellState, JobState], tuple[Row, float] | None] | None = None,
    ) -> None:
        self.waiting: dict[Row, list[Entry[Row]]] = {}
        """Row → its jobs in order, as of the last `update`; no row is empty."""
        self.running: dict[Row, list[Entry[Row]]] = {}
        self.opened: set[Row] = set()
        """Rows that the last `update` has made or removed."""
        self._waits, self._runs = waits, runs
        self._unlisted = NOT_LISTED - (CONTENDING if runs is not None else frozenset())
        """Status of jobs that are in no row."""
        self._changes = Changes(progress=runs is not None)
        self._entered: dict[str, tuple[Entry[Row], dict[Row, list[Entry[Row]]]]] = {}

    def update(self, state: CellState) -> tuple[list[str], bool]:
        """O(changes since the last call · log jobs), plus moving the entries behind each in its row: 40 µs at
        100,000 jobs. Returns these changes (`Changes.ids`)."""
        changed, anew = self._changes.ids(state)
        self.opened.clear()
        if anew:
            for rows in (self.waiting, self.running, self._entered):
                rows.clear()
        jobs, entered, unlisted = state.jobs, self._entered, self._unlisted
        for job_id in changed:
            if job_id not in entered and (job_id not in jobs or jobs[job_id].status in unlisted):
                continue  # it was in no row and is in none
            self._update(state, job_id)
        return changed, anew

    def row_of(self, job_id: str) -> Row | None:
        """The job's row as of the last `update`; None: it is in none."""
        entered = self._entered.get(job_id)
        return None if entered is None else entered[0][3]

    def _update(self, state: CellState, job_id: str) -> None:
        job = state.jobs.get(job_id)
        rows = found = None
        if job is not None:
            if job.in_line:
                if self._waits is not None:
                    rows, found = self.waiting, self._waits(state, job)
            elif self._runs is not None and job.status in CONTENDING:
                rows, found = self.running, self._runs(state, job)
        entered = self._entered.get(job_id)
        if entered is not None:
            before, there = entered
            if rows is there and found is not None and found[1] == before[0] and found[0] == before[3]:
                return
            row = there[before[3]]
            del row[bisect_left(row, before)]
            if not row:
                del there[before[3]]
                self.opened.add(before[3])
            del self._entered[job_id]
        if job is None or found is None or rows is None:
            return
        name, key = found
        entry = key, job.order, job_id, name
        self._entered[job_id] = entry, rows
        present = rows.get(name)
        if present is None:
            rows[name] = [entry]
            self.opened.add(name)
        else:
            insort(present, entry)


def goes_on(state: CellState, job_id: str) -> bool:
    """Whether jobs behind a job that was just tried may still fit: it has started, or the place stage failed
    on it."""
    failed = state.failed_choices
    started = state.jobs[job_id].status is JobStatus.LAUNCHING
    return started or (failed.job_id == job_id and failed.seq == state.seq)


def will_queue_again(job: JobState) -> bool:
    """Whether a job that is being stopped will wait in the queue; a job with a reserved target starts there
    without queueing."""
    return job.stop.reason in QUEUES_AGAIN and job.held is None and not job.target
