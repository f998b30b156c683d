"""Earlier attempts of a job and what its present attempt inherits: work saved in checkpoints, and peaks of
memory.

A job that is stopped and resumes at its checkpoint has a short last attempt. Its run time is that of all work
that counted: of each earlier attempt the work in its checkpoint, and the whole last attempt.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ledger.state.job.checkpoints import Checkpoint
from penstock_services.estimator.core.fold.progress import Progress
from penstock_services.estimator.core.records.conditions import NONE, Disturbance
from penstock_services.estimator.core.records.history import UNKNOWN, Run
from penstock_services.estimator.core.records.runs import Card

ANEW = 0.05  # of the run: an attempt that resumes from less counts as begun anew


class Peak(NamedTuple):
    """The maximum over all workers; NaN: not measured."""

    host_mib: float = UNKNOWN
    gpu_mib: float = UNKNOWN

    def or_more(self, other: "Peak") -> "Peak":
        return Peak(*(_larger(*pair) for pair in zip(self, other, strict=True)))


NO_PEAK = Peak()


@dataclass(slots=True)
class Earlier:
    """Of one live job. `saved`: its latest checkpoint, from any attempt."""

    ran: bool = False
    """An earlier attempt ran, or a snapshot does not record whether one did."""
    kept_ms: float = 0.0
    """Saved work from which the present attempt resumes, as the checkpoints of earlier ones have it, ≥ 0."""
    disturbed: Disturbance = NONE
    """Of the attempts that did that work."""
    workers: set[int] = field(default_factory=set)
    """Numbers of workers of these attempts."""
    awaited: tuple[float, Disturbance, set[int]] | None = None
    """Work in a checkpoint on another node, which the present attempt's node may fetch; as `kept_ms`,
    `disturbed`, `workers`."""
    peak: Peak = NO_PEAK
    """Of the present attempt's tasks that did not succeed."""
    peaks: dict[tuple[int, Card], Peak] = field(default_factory=dict)
    """(workers, card) → peaks of the attempts whose work was saved in that shape; few shapes, since attempts
    are few."""

    def over(
        self, progress: Progress, card: Card, saved: Checkpoint | None, now_ms: int, *, saves: bool
    ) -> None:
        """The present attempt is over at `now_ms`, and another one follows. `saves`: it was asked to stop,
        and saves then."""
        began_ms, peak = progress.started_ms, self.peak
        self.peak = NO_PEAK
        if began_ms is None:
            return
        self.ran = True
        saved_ms = now_ms if saves else 0 if saved is None else min(saved.at_ms, now_ms)
        if saved_ms > began_ms:
            self.kept_ms += saved_ms - began_ms
            self.disturbed |= progress.met(now_ms)
            workers = len(progress.tasks)
            self.workers.add(workers)
            self.peaks[workers, card] = peak.or_more(self.peaks.get((workers, card), NO_PEAK))

    def begin(self, nodes: set[str], contract: str, saved: Checkpoint | None) -> None:
        """An attempt begins on these nodes. Work in a checkpoint that it does not find is done again."""
        self.awaited = None
        lost = saved is not None and not saved.shared and nodes != {saved.node_id}
        if contract == "sdk" and lost:
            self.awaited = self.kept_ms, self.disturbed, self.workers
            self.kept_ms, self.disturbed, self.workers = 0.0, NONE, set()

    def fetched(self, *, whole: bool) -> None:
        """The attempt's node has fetched the checkpoint from another one, or could not."""
        if whole and self.awaited is not None:
            self.kept_ms, self.disturbed, self.workers = self.awaited
        self.awaited = None

    def with_peaks(self, run: Run, workers: int, card: Card) -> Run:
        """With the peaks of attempts with saved work in that shape and on such cards: the last one may not
        show the largest."""
        if not self.peaks:
            return run
        most = self.peaks.get((workers, card), NO_PEAK).or_more(Peak(run.host_memory_mib, run.gpu_memory_mib))
        return run._replace(host_memory_mib=most.host_mib, gpu_memory_mib=most.gpu_mib)

    def whole(self, run: Run, progress: Progress, workers: int, contract: str) -> tuple[Run, str]:
        """(the run with the work that earlier attempts did for it, what was corrected).

        By the number of iterations done before its start, where that and the undisturbed step are known: so
        all of it counts as if done on the last placement. Else by the ledger's checkpoints. Else its run time
        is comparable only if it certainly began anew.
        """
        if not self.ran:
            return run, ""
        skipped_ms = progress.skipped_ms()
        if skipped_ms is not None:
            if skipped_ms <= ANEW * run.run_ms:
                return run, ""
            return _longer(run, skipped_ms), "iterations of earlier attempts"
        if self.kept_ms:
            disturbed = self.disturbed
            if self.workers != {workers}:
                disturbed |= Disturbance.SHAPES
            return _disturbed(_longer(run, self.kept_ms), disturbed), "checkpoints of earlier attempts"
        if contract == "sdk":
            return run, ""
        return _disturbed(run, Disturbance.UNKNOWN_WORK), ""


def _longer(run: Run, by_ms: float) -> Run:
    """A run that resumed: its launch restored a checkpoint, and its training is a part of the job's, so
    neither is that of a whole run."""
    return run._replace(run_ms=run.run_ms + by_ms, launch_ms=UNKNOWN, train_ms=UNKNOWN)


def _disturbed(run: Run, by: Disturbance) -> Run:
    return run._replace(disturbed=float(int(run.disturbed) | by))


def _larger(one: float, other: float) -> float:
    """NaN counts as missing."""
    return other if one != one or other > one else one
