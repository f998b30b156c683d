"""Interface of regroup stages: who runs, and which jobs share GPUs in turns (interleaving), planned for the whole cell.

A plan takes milliseconds to a second, so the placer does not make it: the batcher reads the state, asks in its worker pool, and
proposes what comes out (`PlanProposed` with `stops`, `ranks` and units of kind group). Three steps, all pure:

    question = stage.question(state)       # what the plan depends on, and no more: small, and passes between processes
    answer = question and solve(question)  # the long part; the same question gives the same answer
    plan = stage.plan(state, answer)       # nodes, and as few stops as possible, on a state that may have moved on
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock.ledger.demand import Demand
from penstock.ledger.job_state import JobState
from penstock.ledger.state import CellState
from penstock.model.groups import Turns
from penstock.model.ledger_events import JobRank
from penstock.model.proposals import ProposedUnit
from penstock.model.types import WHOLE_GPU, ResourceVector, StageTimes


def regroups(demand: Demand) -> bool:
    """Whether a job with this demand is planned by regroup stages: others are placed as under a profile without one."""
    return has_whole_gpus(demand.worker)


def has_whole_gpus(worker: ResourceVector) -> bool:
    """As `regroups`, by what a worker needs."""
    return worker.gpus > 0 and worker.gpu_share_milli == WHOLE_GPU


class Scope(NamedTuple):
    """Which jobs with whole GPUs a stage plans, and which of them it may stop; the others keep what they have."""

    plans: Callable[[JobState], bool]
    stops: Callable[[JobState], bool]


ALL_JOBS = Scope(lambda job: True, lambda job: job.spec.preemptible)

PROPOSER = "batcher"
"""Who proposes what regroup stages plan: plans of others stop nobody."""


class Candidate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A job that runs or could. Seconds are real, ≥ 0, and alone on its GPUs; infinite where they are not known."""

    job_id: str
    gpus: int
    """Of all its tasks together."""
    shape: tuple[int, int, int, int]
    """Workers, GPUs of each, parameter servers, GPUs of each: members of a group have the same."""
    stages: StageTimes | None
    remaining_s: float
    attained_s: float
    order: int
    """Of its submission."""
    rank: tuple[int, int, int] | None
    """As the stage's own order had it last (`JobState.rank`); None: the stage has not seen it yet."""
    group: str
    """Jobs with the same one, not empty, hold the same GPUs now; empty: it does not run. Who runs alone has a group of its own."""
    movable: bool
    """Whether it may be stopped: what is not keeps its GPUs, with or without company."""
    stop_cost_s: float
    gpu_memory_mib: int
    """Promised on each of its GPUs: the members' sum has to fit."""


class Question(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What a plan depends on."""

    stage: str
    """Which `solve` answers it: the name of the profile."""
    jobs: tuple[Candidate, ...]
    """In the stage's order: who may not be stopped, then the first. Who comes too late to be planned is not listed."""
    node_gpus: tuple[int, ...]
    """Sound GPUs that may be used of each open node, by ordinal."""
    gpu_memory_mib: int
    """Of the smallest GPU; 0: not known, so memory does not bind."""
    now_ms: int
    behind: int = 0
    """So many more wait that are not listed; all of them come later."""


class PlannedGroup(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Jobs that hold the same GPUs; mostly one alone."""

    job_ids: tuple[str, ...]
    """First by the stage's order first."""
    turns: Turns | None = None
    """None: it is alone."""


class Answer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Who shall run, in the order in which they get nodes; everybody else waits."""

    groups: tuple[PlannedGroup, ...]
    ranks: tuple[JobRank, ...] = ()
    """Changes of the stage's own order only."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change although nothing happens; None: it does not."""


class GroupPlan(NamedTuple):
    """What the batcher proposes; nothing in any of it: everything stays as it is."""

    units: Sequence[ProposedUnit]
    stops: Sequence[str]
    ranks: Sequence[JobRank]


class Regroup(Protocol):
    """A stage of a profile, see the module's docstring. The placer stops whom the plan stops only for units that can then start."""

    fills: bool
    """Whether others may start in the order of the profile where a plan leaves room: it counts GPUs alone, and may find none for a job that fits."""
    beside: bool
    """Whether a job that fits starts at once, and the plan is only waited for where one does not."""

    def question(self, state: CellState) -> Question | None:
        """None: nobody waits and nobody shares GPUs, so there is nothing to plan."""
        ...

    def solve(self, question: Question) -> Answer:
        """The long part. Touches no state, so it may run in another process."""
        ...

    def plan(self, state: CellState, answer: Answer) -> GroupPlan:
        """Members that hold the same GPUs now and shall go on doing so are not restarted. Who of the answer has ended meanwhile is left out."""
        ...


def may_help(state: CellState, stage: Regroup) -> bool:
    """Whether a plan may start a job that finds no room. Where the stage stands beside others, only while jobs ask for more GPUs than there are, or share some: else what
    they wait for is something else. O(shapes)."""
    if not stage.beside:
        return True
    gpus = sum(
        shape.gpus * (nodes & ~state.index.gone).bit_count() for shape, nodes in state.index.shape.items()
    )
    return bool(state.groups) or state.arrays.large_gpus + state.arrays.small_gpus > gpus


def waits_for_plan(state: CellState, stage: Regroup | None) -> bool:
    """Whether nobody whom the stage plans starts beside its latest plan. In a cell in which nothing runs somebody has to."""
    return stage is not None and not stage.fills and state.plan_stands and bool(state.holding)
