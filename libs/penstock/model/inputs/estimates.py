"""Events of the estimator: estimates of a job's resources and run time, trained models, profiling plans."""

from typing import Annotated

from msgspec import Meta

from penstock.model.inputs.external_events import Attempt
from penstock.model.nouns.types import Estimate, Identifier, Milliseconds, ShortText, Value
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import Topic


@event
class JobEstimated(Event, frozen=True, kw_only=True):
    """Estimate of a job's resources and run time; the job may be placed from now on."""

    TYPE = "penstock.job.estimated"
    TOPIC = Topic.ESTIMATES
    OMITTED = ("attempt",)

    job_id: Identifier
    estimate: Estimate
    attempt: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """The attempt that the estimate is for, where an earlier one has failed; 0: the first."""


@event
class ModelTrained(Event, frozen=True, kw_only=True):
    """A new version of an estimator's model."""

    TYPE = "penstock.model.trained"
    TOPIC = Topic.ESTIMATES

    model_version: Identifier
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    runs: Annotated[int, Meta(ge=0)]
    first_run_ms: Milliseconds
    last_run_ms: Milliseconds
    metrics: dict[str, float]


class Bounds(Value, frozen=True, kw_only=True):
    """Most likely value, and its prediction interval at the level that is given with it."""

    middle: Annotated[float, Meta(ge=0)]
    low: Annotated[float, Meta(ge=0)]
    high: Annotated[float, Meta(ge=0)]


@event
class EtaEstimated(Event, frozen=True, kw_only=True):
    """Estimated remaining time of a running job, from the steps that it reported."""

    TYPE = "penstock.job.eta_estimated"
    TOPIC = Topic.ESTIMATES
    OMITTED = ("first_of_kind",)

    job_id: Identifier
    attempt: Attempt
    at_ms: Milliseconds
    """Time from which `left_ms` counts."""
    done: Annotated[int, Meta(ge=0, le=1 << 53)]
    """Iterations done."""
    left_ms: Bounds
    steps: Bounds
    """Remaining iterations."""
    step_ms: Bounds
    level: Annotated[float, Meta(gt=0, lt=1)]
    source: ShortText
    model_version: Identifier | None = None
    first_of_kind: bool = False
    """The error of such estimates was measured on finished runs of other kinds of training, and on none of
    this kind."""


class Probe(Value, frozen=True, kw_only=True):
    """One placement and batch to measure.
    Spreads are standard deviations of ln of the step time, weighted by use."""

    gpus_per_node: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=64)], ...], Meta(min_length=1, max_length=4_096)
    ]
    local_batch: Annotated[float, Meta(gt=0)]
    """Samples per GPU and step."""
    spread_before: Annotated[float, Meta(ge=0)]
    spread_after: Annotated[float, Meta(ge=0)]


@event
class ProfilePlanned(Event, frozen=True, kw_only=True):
    """Profiling plan: the few placements of a network to measure next, the most useful first. Source: GENIE
    §III (light profiling)."""

    TYPE = "penstock.profile.planned"
    TOPIC = Topic.ESTIMATES

    model: Identifier
    gpu_model: Identifier
    owner: Identifier
    model_version: Identifier
    """Version of the step-time model; the plan reduces its uncertainty."""
    probes: Annotated[tuple[Probe, ...], Meta(min_length=1, max_length=64)]


@event
class StagesProfiled(Event, frozen=True, kw_only=True):
    """Profile of one iteration for interleaving: how long it uses storage, CPU, GPU and network.
    Source: Muri §5."""

    TYPE = "penstock.stages.profiled"
    TOPIC = Topic.ESTIMATES

    model: Identifier
    batch_size: Annotated[int, Meta(ge=1)]
    gpus: Annotated[int, Meta(ge=1)]
    """GPUs of all workers together."""
    storage_ms: Annotated[float, Meta(ge=0)]
    cpu_ms: Annotated[float, Meta(ge=0)]
    gpu_ms: Annotated[float, Meta(ge=0)]
    network_ms: Annotated[float, Meta(ge=0)]
    idle_ms: Annotated[float, Meta(ge=0)]
    iteration_ms: Annotated[float, Meta(gt=0)]
    iterations: Annotated[int, Meta(ge=1)]
    """Number of iterations that the profile is computed from."""
