"""Interface of migrate stages: which running jobs migrate to other nodes, by the convergence of their losses.

The default profile's stage is `load_balance.py`; the placer carries moves out in `core/plans/moves.py`.

The placer does not call them: the migrator folds the ledger, receives losses from the telemetry topic, and
proposes a stage's result (`MigrationProposed`). Facts about moves (when a job was evaluated, how often it was
moved) are in the ledger; categories are in the migrator only, rebuilt from telemetry and the runs of the
job's attempts after a restart.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.moves import MoveCause
from penstock.scheduling.acting.convergence import Category, Monitor
from penstock.scheduling.acting.crowding import Crowding

PROPOSER = "migrator"


class Migration(NamedTuple):
    """A running job and its target nodes; if these are its current nodes, it was evaluated and stays."""

    job_id: str
    nodes: tuple[str, ...]
    """Target node per task in rank order."""
    cause: MoveCause
    reason: str


Categories = Mapping[str, Category]
"""Job id → category, of running jobs that have reported a loss; the others count as progressing (SpeCon Alg.
1, line 2)."""


class Seen(NamedTuple):
    """The migrator's inputs in addition to the state."""

    now_ms: int
    """The ledger's time, also while no record arrives."""
    categories: Categories
    crowding: Crowding
    asking: Sequence[str]
    """Ids of jobs that may give up their place (`Monitor.look`), in the order of their requests."""


class Migrate(Protocol):
    """A stage of a profile, see the module's docstring.
    Pure: the same state and categories give the same answer."""

    def monitor(self) -> Monitor:
        """A new monitor for a job that reports its first loss."""
        ...

    def migrations(self, state: CellState, seen: Seen) -> Sequence[Migration]:
        """The migrations to propose, in order."""
        ...


def category_of(job: JobState, categories: Categories) -> Category:
    """Category of a running job; a job with `converged_ms` has converged."""
    return (
        Category.CONVERGED
        if job.moves.converged_ms is not None
        else categories.get(job.job_id, Category.PROGRESSING)
    )
