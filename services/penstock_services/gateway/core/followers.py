"""Which reports about followers of jobs a gateway owes, from its open streams and the ledger's state
(decision 138). Pure.

Ideal: the ledger knows at each moment whether a job has a follower. Departure: a connection that breaks again
and again would fill the ledger, so a loss is reported at most once in `APART_S` per job.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from penstock.ledger.state.state import CellState
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.schema.topics import Topic

APART_S = 10.0
"""Between two losses of one job: a client that reconnects every 0.2 s makes two records in this time."""
RETURNED_WITHIN_S = 10.0
"""After a gateway's start; a client tries again for 16 s, at least every 5 s."""


@dataclass(slots=True)
class Followers:
    """The followers of one run of a gateway. Times in s, of one clock that never steps."""

    gateway: str
    """Id of this run."""
    began_s: float
    """Since when followers can connect."""
    jobs_end: int = 0
    """Offset in the jobs' topic before which all reports of runs are that had ended by then."""
    _open: dict[str, set[object]] = field(default_factory=dict)
    """Job → its followers' streams."""
    _lost_s: dict[str, float] = field(default_factory=dict)
    """Job whose last stream has ended → when."""
    _loss_said_s: dict[str, float] = field(default_factory=dict)
    _said: dict[str, FollowerChanged] = field(default_factory=dict)
    """Job → the latest report."""
    _looked_back: bool = False

    def opened(self, job_ids: Iterable[str], stream: object) -> None:
        for job_id in job_ids:
            self._open.setdefault(job_id, set()).add(stream)
            self._lost_s.pop(job_id, None)

    def closed(self, job_ids: Iterable[str], stream: object, now_s: float) -> None:
        for job_id in job_ids:
            self._open[job_id].discard(stream)
            if not self._open[job_id]:
                del self._open[job_id]
                self._lost_s[job_id] = now_s

    def due(self, state: CellState, now_s: float) -> tuple[list[FollowerChanged], float | None]:
        """The reports that are due, and in how many s further ones may be; None: not before something
        changes. O(followed jobs)."""
        found = list(self._connections(state))
        waits_s = []
        for job_id, lost_s in list(self._lost_s.items()):
            job = state.jobs.get(job_id)
            if job is None or job.spec.tied_to is None:
                self._forget(job_id)
            elif job.following.gateway == self.gateway:
                due_s = self._loss_said_s.get(job_id, now_s - APART_S) + APART_S
                if due_s > now_s:
                    waits_s.append(due_s - now_s)
                else:
                    found += self._lost(state, job_id, job.following.gateway, now_s, lost_s)
        looks_s = self.began_s + RETURNED_WITHIN_S - now_s
        if not self._looked_back and looks_s > 0:
            waits_s.append(looks_s)
        elif (
            not self._looked_back and state.inputs_read(Topic.JOBS) >= self.jobs_end
        ):  # a late placer reads them first
            self._looked_back = True
            found += self._of_other_runs(state, now_s)
        return found, min(waits_s, default=None)

    def failed(self, reports: Iterable[FollowerChanged]) -> None:
        """These could not be written: they are due again."""
        for report in reports:
            self._said.pop(report.job_id, None)
            self._loss_said_s.pop(report.job_id, None)
            if report.gateway != self.gateway:
                self._looked_back = False

    def _connections(self, state: CellState) -> Iterator[FollowerChanged]:
        for job_id in self._open:
            job = state.jobs.get(job_id)
            if job is not None and job.following.absent_ms is not None:
                yield from self._say(state, job_id, self.gateway, connected=True)

    def _lost(
        self, state: CellState, job_id: str, gateway: str, now_s: float, lost_s: float
    ) -> Iterator[FollowerChanged]:
        silent_ms = round(1_000 * (now_s - lost_s))
        for report in self._say(state, job_id, gateway, connected=False, silent_ms=silent_ms):
            self._loss_said_s[job_id] = now_s
            yield report

    def _of_other_runs(self, state: CellState, now_s: float) -> Iterator[FollowerChanged]:
        """Once, some time after the start: a connection to another run, such as the one before this start,
        counts as lost since this start. A gateway that still has such a connection says so."""
        for job in state.jobs.values():
            if job.following.gateway not in ("", self.gateway):
                if job.job_id in self._open:
                    yield from self._say(state, job.job_id, self.gateway, connected=True)
                else:
                    yield from self._lost(state, job.job_id, job.following.gateway, now_s, self.began_s)

    def _say(
        self, state: CellState, job_id: str, gateway: str, *, connected: bool, silent_ms: int = 0
    ) -> Iterator[FollowerChanged]:
        """The report, unless the same one is under way."""
        before, changed_seq = self._said.get(job_id), state.jobs[job_id].following.seq
        if before is not None and before.connected is connected and changed_seq <= before.after:
            return
        self._said[job_id] = FollowerChanged(
            job_id=job_id, gateway=gateway, connected=connected, after=state.seq, silent_ms=silent_ms
        )
        yield self._said[job_id]

    def _forget(self, job_id: str) -> None:
        for known in (self._lost_s, self._said, self._loss_said_s):
            known.pop(job_id, None)
