"""Interface of migrate stages: which running jobs go on elsewhere, by how their losses fall.

The placer does not ask them: the migrator folds the ledger, hears losses from the telemetry topic, and proposes what a stage finds
(`MigrationProposed`). Facts about moves (when a job was judged, how often it was moved) are the ledger's; categories are the migrator's
own, rebuilt from telemetry after a restart.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock.ledger.state import CellState
from penstock.model.moves import MoveCause
from penstock.policies.convergence import Category, Monitor
from penstock.policies.crowding import Crowding

PROPOSER = "migrator"


class Migration(NamedTuple):
    """A running job and where it is to go on; with the nodes on which it runs: it was judged, and stays."""

    job_id: str
    nodes: tuple[str, ...]
    """Per task in rank order."""
    cause: MoveCause
    reason: str


Categories = Mapping[str, Category]
"""By job id, of running jobs that have reported a loss; the others count as progressing (SpeCon Alg. 1, line 2)."""


class Seen(NamedTuple):
    """What the migrator has beside the state."""

    now_ms: int
    """The ledger's time, also while no record comes."""
    categories: Categories
    crowding: Crowding
    asking: Sequence[str]
    """Ids of jobs that may give up their place (`Monitor.look`), first asked first."""


class Migrate(Protocol):
    """A stage of a profile, see the module's docstring. Pure: the same state and categories give the same answer."""

    def monitor(self) -> Monitor:
        """Of a job that reports its first loss."""
        ...

    def migrations(self, state: CellState, seen: Seen) -> Sequence[Migration]:
        """What to propose, first first."""
        ...
