"""Interface of regroup stages: plans for the whole cell which jobs run, and which share GPUs in turns
(interleaving).

A plan takes milliseconds to a second, so the placer does not make it: the batcher reads the state, solves in
its worker pool, and proposes the result (`PlanProposed` with `stops`, `ranks` and units of kind group). Three
steps, all pure:

    question = stage.question(state)       # what the plan depends on, and no more: small, and passes between
    processes answer = question and solve(question)  # the long part; the same question gives the same answer
    plan = stage.plan(state, answer)       # nodes, and as few stops as possible, on a state that may have
    changed
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock.ledger.state.job.demand import Demand
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import Turns
from penstock.model.decisions.ledger_events import JobRank
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, StageTimes
from penstock.model.proposals import ProposedUnit


def regroups(demand: Demand) -> bool:
    """Whether a job with this demand is planned by regroup stages: other jobs are placed as under a profile
    without one."""
    return has_whole_gpus(demand.worker)


def has_whole_gpus(worker: ResourceVector) -> bool:
    """As `regroups`, by a worker's demand."""
    return worker.gpus > 0 and worker.gpu_share_milli == WHOLE_GPU


class Scope(NamedTuple):
    """Which jobs with whole GPUs a stage plans, and which of them it may stop, by their specifications; the
    others stay as they are."""

    plans: Callable[[JobState], bool]
    stops: Callable[[JobState], bool]


ALL_JOBS = Scope(lambda job: True, lambda job: job.spec.preemptible)

PROPOSER = "batcher"
"""The proposer of plans of regroup stages: plans of other proposers stop no job."""


class Candidate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A job that runs or could run. Seconds are real numbers, ≥ 0, alone on its GPUs; infinite where they are
    not known."""

    job_id: str
    gpus: int
    """GPUs of all its tasks together."""
    shape: tuple[int, int, int, int]
    """(workers, GPUs per worker, parameter servers, GPUs per server): equal for all members of a group."""
    stages: StageTimes | None
    remaining_s: float
    attained_s: float
    order: int
    """Order of its submission."""
    rank: tuple[int, int, int] | None
    """Its latest rank in the stage's own order (`JobState.rank`);
    None: it was in no plan of the stage yet."""
    group: str
    """Jobs with the same non-empty group hold the same GPUs now; empty: the job does not run. A job that runs
    alone has its own group."""
    movable: bool
    """Whether it may be stopped; else it stays on its GPUs, alone or shared."""
    stop_cost_s: float
    gpu_memory_mib: int
    """Memory reserved on each of its GPUs: the members' sum has to fit."""
    circle: str = ""
    """Jobs of equal circles may share GPUs (`penstock.scheduling.groups.validate_groups`)."""
    apart: int = 0
    """Its marks (`validate_groups.marks_of`): kinds that it shares no GPUs with."""


class Question(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The inputs of a plan."""

    stage: str
    """Name of the profile whose `solve` answers it."""
    jobs: tuple[Candidate, ...]
    """In the stage's order: jobs that may not be stopped, then the others. Jobs too late in the order to be
    planned are not listed."""
    node_gpus: tuple[int, ...]
    """Usable sound GPUs of each open node, by ordinal."""
    gpu_memory_mib: int
    """Memory of the smallest GPU; 0: not known, so memory is not bounded."""
    now_ms: int
    behind: int = 0
    """Number of unlisted waiting jobs; all listed waiting jobs come before them."""
    ahead: tuple[float, ...] = ()
    """Unlisted waiting jobs ahead of each listed job with an unknown run time (ties count ½); 0 for other
    jobs. Empty: no unlisted job is ahead of any."""


class PlannedGroup(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Jobs that hold the same GPUs; mostly a single one."""

    job_ids: tuple[str, ...]
    """Members in the stage's order."""
    turns: Turns | None = None
    """Predicted interleaving; None: the job is alone."""


class Answer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The groups that shall run, in the order in which they get nodes; all other jobs wait."""

    groups: tuple[PlannedGroup, ...]
    ranks: tuple[JobRank, ...] = ()
    """Only the changes of the stage's own order."""
    wake_ms: int | None = None
    """Ledger time at which the answer may change without an event; None: it does not."""
    started_wake_ms: int | None = None
    """Wake-up time if the plan is accepted; ledger time in ms."""


class GroupPlan(NamedTuple):
    """The batcher's proposal; all parts empty: nothing changes."""

    units: Sequence[ProposedUnit]
    stops: Sequence[str]
    ranks: Sequence[JobRank]


class Regroup(Protocol):
    """A stage of a profile, see the module's docstring. The placer makes a plan's stops only for units that
    can then start."""

    exact: bool
    """Whether it is a source's algorithm as printed, which knows neither tenants nor measured speeds: jobs of
    all tenants share GPUs, and no group is dissolved."""
    fills: bool
    """Whether other jobs may start in the profile's order where a plan leaves room: a plan counts only GPUs,
    and may leave out a job that fits."""
    beside: bool
    """Whether a job that fits starts at once, so that only jobs that do not fit wait for the plan."""

    def question(self, state: CellState) -> Question | None:
        """None: no job waits and no jobs share GPUs, so there is nothing to plan."""
        ...

    def solve(self, question: Question) -> Answer:
        """The long part. Uses no state, so it may run in another process."""
        ...

    def plan(self, state: CellState, answer: Answer) -> GroupPlan:
        """The plan for an answer. Members that hold the same GPUs now, and shall continue to, are not
        restarted. Jobs that have ended meanwhile are left out."""
        ...


def may_help(state: CellState, stage: Regroup) -> bool:
    """Whether a plan may start a job that finds no room. For a stage that is `beside` others only while jobs
    ask for more GPUs than exist, or share some: else they wait for another resource. O(shapes)."""
    if not stage.beside:
        return True
    gpus = sum(
        shape.gpus * (nodes & ~state.index.gone).bit_count() for shape, nodes in state.index.shape.items()
    )
    return bool(state.groups) or state.arrays.large_gpus + state.arrays.small_gpus > gpus


def waits_for_plan(state: CellState, stage: Regroup | None) -> bool:
    """Whether jobs that the stage plans may not start outside its latest plan. In a cell without running jobs
    they may."""
    return stage is not None and not stage.fills and state.plan_stands and bool(state.holding)
