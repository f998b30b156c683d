"""Interface of guard stages: whose cores are searched for while they run, how, and whether who slows a training is slowed.

The placer does not ask them: the contention-guard folds the ledger, reads windows of telemetry, and proposes what follows (`CoresProposed`,
`ThrottleProposed`). What bounds it are facts of the ledger (`penstock.policies.validate_adjustments`); what it measured is its own.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.ledger.job_state import JobState
from penstock.model.settings import Contention
from penstock.policies.core_search import Next, Seen, across_nodes, search, walk

PROPOSER = "contention-guard"
Step = Callable[[int, Sequence[Seen], int, int], Next]
"""(start, what was measured, most that it can have, fewest that are tried) → what to try next."""
SEARCHES: Mapping[str, Step] = MappingProxyType({"doubling": search, "walk": walk})


class Guard(NamedTuple):
    """A stage of a profile."""

    step: Step | None
    """None: cores stay as they were placed."""
    users_cores: Literal["respect", "at_least", "override"]
    """As `Contention.users_cores`."""
    eliminates: bool
    """Whether jobs without GPUs are slowed where they slow a training."""
    halves: bool
    """Whether they then lose half their cores, also where the training's loss asks for more."""

    def step_of(self, job: JobState) -> Step | None:
        """How the cores of a running job are searched for; None: they stay."""
        if self.step is None or (job.spec.resources.cores is not None and self.users_cores == "respect"):
            return None
        nodes = {task.place.node_id for task in job.tasks.values()}
        return self.step if len(nodes) == 1 else across_nodes

    def least_of(self, job: JobState, start: int, gpus: int) -> int:
        """The fewest cores that are tried for a worker that began with `start`: one per GPU, and what its user named. At most `start`."""
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
