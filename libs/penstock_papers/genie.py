"""GENIE's Alg. 1 as published, and the baselines that its paper compares with. Source: GENIE §III, §IV-A.

The body is the product's (`penstock.scheduling.order.genie`), which adds three rules; here they are left out
again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from types import MappingProxyType

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import ShapeOption
from penstock.scheduling.order.deadlines import urgent
from penstock.scheduling.order.genie import Genie, Offers, Placement
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.key_order import Ranked


class _Ordered(Genie, Ranked):
    """Least slack first, after the jobs that can no longer be in time: the product's rules alone."""

    def order(self, state: CellState) -> Iterator[str]:
        """Line 13. O(waiting jobs × options)."""
        jobs = [state.jobs[job_id] for job_id in state.queue.values()]
        jobs.sort(key=lambda job: self._key(state, job))
        for job in jobs:
            yield job.job_id

    def _key(self, state: CellState, job: JobState) -> tuple[int, float, int]:
        """Sort key of a waiting job: whether its deadline is lost, w_i, order of submission."""
        allowance = self.choice(state, job).allowance_ms
        return int(allowance < 0 and not urgent(job.spec)), allowance, job.order

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """A job that does not start is skipped."""
        del holding, at_ms
        ordered = sorted(waiting, key=lambda job: self._key(state, job))
        for job in ordered:  # noqa: UP028 - a list takes no `send`
            yield job


class Algorithm1(_Ordered):
    """The best ratio of speed to cost that is in time, else the best of all; least slack first."""

    def _sure_ms(self, job: JobState, option: ShapeOption) -> float:
        return inf

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        return self._in_time(state, offers, due_ms) or offers.ranked[0]

    def _key(self, state: CellState, job: JobState) -> tuple[int, float, int]:
        return 0, self.choice(state, job).allowance_ms, job.order


class _Baseline(Algorithm1):
    """Serves in order of arrival."""

    def order(self, state: CellState) -> Iterator[str]:
        """That of the queue."""
        yield from list(state.queue.values())

    def _key(self, state: CellState, job: JobState) -> tuple[int, float, int]:
        return 0, 0.0, job.order


class BestRatio(_Baseline):
    """CERPre: the best ratio of speed to cost."""

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        return offers.ranked[0]


class Fastest(_Baseline):
    """PerfPre: the shortest iteration."""

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        return min(offers.ranked, key=lambda one: (one.option.step_ms, one.option.workers, one.option.nodes))


class FewestGpus(_Baseline):
    """MinOcc: the fewest GPUs."""

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        return min(offers.ranked, key=lambda one: (one.option.workers, one.option.nodes))


class MostGpus(_Baseline):
    """MaxOcc: the most GPUs that fit now."""

    def _best(self, state: CellState, job: JobState, offers: Offers, due_ms: float) -> Placement:
        largest = sorted(offers.found, key=lambda one: (-one.option.workers, one.option.nodes))
        fitting = (one for one in largest if self._nodes_for(state, job, one.option))
        return next(fitting, offers.found[0])


CHOICES: Mapping[str, Callable[..., _Ordered]] = MappingProxyType(
    {
        "qos": Algorithm1,
        "protect": _Ordered,
        "ratio": BestRatio,
        "performance": Fastest,
        "most": MostGpus,
        "least": FewestGpus,
    }
)
"""Value of the setting `genie.choose` → its stage."""
