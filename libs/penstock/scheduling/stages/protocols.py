"""Interfaces of scheduling policies: the protocols of a profile's stages, and the conversion of a plan into a
placement decision.

A policy chooses nodes. GPUs, unless the policy names them, and cores are chosen here (lowest free
first), so that no policy leaves a choice to the node. A policy reads the state and writes nothing.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import JobRank
from penstock.model.decisions.plans import PlanUnit
from penstock.model.proposals import PlanProposed
from penstock.scheduling.acting.guard import Guard
from penstock.scheduling.acting.migrate import Migrate
from penstock.scheduling.stages.batch import Batch
from penstock.scheduling.stages.reclaim import Reclaim
from penstock.scheduling.stages.regroup import Regroup

Choose = Callable[[CellState, JobState, LazyRng], Plan | None]
"""Signature of `Policy.place`."""


class Policy(Protocol):
    """Chooses nodes for a gang, all or nothing."""

    @property
    def name(self) -> str:
        """The profile's name."""
        ...

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """The chosen nodes, or None when the gang does not fit now.
        Must not examine more nodes than necessary."""
        ...


class Shape(Protocol):
    """A stage of a profile: how many workers a moldable job starts with."""

    @property
    def waits(self) -> bool:
        """Whether a job waits for that many workers though it could start with fewer; for forecasts."""
        ...

    def shape(self, state: CellState, job: JobState, fitting: int) -> tuple[int, str]:
        """(workers, reason as text), for a job that is about to be placed: from its minimum to `fitting`, the
        most that fit now; more: it waits for them."""
        ...


Turns = Generator[JobState, bool, None]
"""Waiting jobs, each in its turn; `send` reports whether the last one has started."""


class Ranking(Protocol):
    """The waiting jobs of a what-if in a profile's order, which changes as jobs start and end."""

    def turns(self, at_ms: int) -> Turns:
        """The order at this time. A job that starts waits no longer, and holds its demand; one that does not
        is followed by all that may overtake it."""
        ...

    def ends(self, job: JobState) -> None:
        """A job that holds resources in the what-if holds none any more."""
        ...


class Order(Protocol):
    """A stage of a profile: its own order of the waiting jobs; running jobs are not stopped."""

    def order(self, state: CellState) -> Iterator[str]:
        """Ids of waiting jobs in the order in which they are tried, none twice.

        Continues after each try from the then current state: the last job has been placed, or still waits.
        """
        ...

    def ranking(self, state: CellState, waiting: Iterable[JobState] | None = None) -> Ranking:
        """The order in a what-if that begins now. `waiting`: the jobs that wait in it; None: the queue's. The
        state must not change while it is used."""
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """The reason for a job's position in that order, as text; for `why`."""
        ...


class Selection(msgspec.Struct, frozen=True, gc=False):
    """Which jobs shall run now, as differences from the running ones."""

    claims: tuple[str, ...] = ()
    """Ids of jobs that wait, or are being stopped, and shall run; highest priority first."""
    stops: tuple[str, ...] = ()
    """Ids of jobs that run and shall not; lowest priority first."""
    ranks: tuple[JobRank, ...] = ()
    """Changes of the policy's own order; written to the ledger, so that the next plan reads them."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change without an event; None: it does not."""


NO_LIMITS: Mapping[DemandKey, int] = MappingProxyType({})


class Preemption(Protocol):
    """A stage of a profile: selects the jobs that run, and may preempt running ones; the place stage chooses
    the nodes.

    The placer asks once for all inputs of one ledger time. The same state must give the same answer, and
    carrying a plan out must not change it: stops take time, and the stage is asked again when they are
    proven.
    """

    def select(self, state: CellState, at_most: Mapping[DemandKey, int] = NO_LIMITS) -> Selection:
        """Selects by numbers of GPUs only, as if every job that may run could be moved; GPUs of stopped jobs
        count as free.

        `at_most`: how many jobs of a demand fit on the nodes, whichever others are stopped; no more of them
        are selected.
        """
        ...

    def later(self, state: CellState, job: JobState) -> Iterator[JobState]:
        """Running jobs with a lower priority than this job, lowest first: they may be stopped for it."""
        ...

    def ranking(self, state: CellState) -> Sequence[str]:
        """Ids of all jobs that may run, highest priority first, whether they fit or not; for `why`."""
        ...

    def claim(self, state: CellState, job: JobState) -> str:
        """The reason for a job's position in that order, as text; for `why`."""
        ...


class Backfill(Protocol):
    """A stage of a profile beside `Order`: reserves nodes for the first job in order that does not fit, and
    lets others run there meanwhile."""

    def unit(self, state: CellState, job: JobState) -> PlanUnit | None:
        """The nodes reserved for the job; None: none, and it blocks no other job. Gives the same answer until
        that is no longer correct."""
        ...

    def may_use(self, state: CellState, job: JobState, unit: PlanUnit) -> bool:
        """Whether the job may start on these nodes meanwhile."""
        ...

    def beside(self, state: CellState, job: JobState, unit: PlanUnit) -> Plan | None:
        """As `Policy.place`, but not on these nodes unless the job may use them."""
        ...

    def any_fits(self, state: CellState) -> bool:
        """Whether a node has room for a worker of any waiting job: else no job can start, in whatever order
        they are tried."""
        ...


class GiveWay(Protocol):
    """A stage of a profile beside `Order`: running jobs make way for others, and resume elsewhere or with
    fewer workers."""

    def plan(self, state: CellState) -> PlanProposed | None:
        """Which jobs make way for which, and where both are placed, as a plan with stops of this profile;
        None: no such plan has a benefit."""
        ...


class Profile(NamedTuple):
    """A scheduling profile: the stages that decide which jobs run, when and where. For a stage that is None
    the placer's default applies.

    Without `preempt` no job is stopped, and jobs are tried at each event: in the order of `order`, or first
    come, first served with a bounded window for backfill. Without `shape` a moldable job starts with as many
    workers as fit.
    """

    name: str
    place: Policy
    order: Order | None = None
    preempt: Preemption | None = None
    backfill: Backfill | None = None
    shape: Shape | None = None
    regroup: Regroup | None = None
    """The batcher plans which jobs run and which share GPUs (`penstock.scheduling.stages.regroup`); the other
    stages apply until its plan arrives, or if none arrives."""
    batch: Batch | None = None
    """The batcher plans where the jobs of a burst start (`penstock.scheduling.stages.batch`) while a batch
    window is open."""
    migrate: Migrate | None = None
    """The migrator proposes which running jobs resume elsewhere (`penstock.scheduling.acting.migrate`)."""
    make_way: GiveWay | None = None
    """Which running jobs make way for a waiting one.
    Not beside `preempt` or `regroup`, which stop jobs by themselves."""
    guard: Guard | None = None
    """For which running jobs the contention-guard changes cores and memory bandwidth
    (`penstock.scheduling.acting.guard`); the setting `contention` overrides it."""
    reclaim: Reclaim | None = None
    """From which jobs borrowed resources are reclaimed for a job that does not fit
    (`penstock.scheduling.stages.reclaim`); beside `order`."""
    prelaunch: bool = False
    """Whether jobs may launch on GPUs of jobs that are about to end by themselves
    (`penstock.scheduling.make_room.prelaunch`); False: as in sources without this."""
    beside_stops: bool = True
    """Start jobs that fit while other stops are in progress (papers with instant stops: False)."""
