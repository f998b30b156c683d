"""Interface of guard stages: the search for running jobs' core counts, and the throttling of jobs that slow
down a training job.

The placer does not call them: the contention-guard folds the ledger, reads windows of telemetry, and proposes
changes (`CoresProposed`, `ThrottleProposed`). Their bounds are facts of the ledger
(`penstock.proposals.validate_adjustments`); the guard's measurements are not in the ledger.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.ledger.state.job.adjusted import Adjustment
from penstock.ledger.state.job.job_state import JobState
from penstock.model.nouns.settings import Contention
from penstock.scheduling.acting.core_search import Next, Seen, across_nodes, search, walk

PROPOSER = "contention-guard"
Step = Callable[[int, Sequence[Seen], int, int], Next]
"""(start, measurements, most cores that it can have, fewest that are tried) → the cores to try next."""
SEARCHES: Mapping[str, Step] = MappingProxyType({"doubling": search, "walk": walk})


def set_by_operator(adjustment: Adjustment | None) -> bool:
    """Whether this latest adjustment of a task is an operator's, so that the guard leaves it alone. A
    restored ledger knows none (`Adjustment.by`)."""
    return adjustment is not None and adjustment.by not in ("", PROPOSER)


class Guard(NamedTuple):
    """A stage of a profile."""

    step: Step | None
    """Search step; None: cores stay as placed."""
    users_cores: Literal["respect", "at_least", "override"]
    """See `Contention.users_cores`."""
    eliminates: bool
    """Whether jobs without GPUs are throttled where they slow down a training job."""
    halves: bool
    """Whether they then lose half their cores, also where the training job's slowdown requires more."""

    def step_of(self, job: JobState) -> Step | None:
        """Search step for the cores of a running job; None: they stay."""
        if self.step is None or (job.spec.resources.cores is not None and self.users_cores == "respect"):
            return None
        nodes = {task.place.node_id for task in job.tasks.values()}
        return self.step if len(nodes) == 1 else across_nodes

    def least_of(self, job: JobState, start: int, gpus: int) -> int:
        """The fewest cores that are tried for a worker that began with `start`: one per GPU, or what its user
        specified. At most `start`."""
        named = job.spec.resources.cores is not None and self.users_cores == "at_least"
        return start if named else min(start, gpus)


def guard_of(settings: Contention) -> Guard:
    """The stage that these settings describe."""
    return Guard(
        SEARCHES.get(settings.search),
        settings.users_cores,
        eliminates=settings.eliminate,
        halves=settings.throttle == "half",
    )
