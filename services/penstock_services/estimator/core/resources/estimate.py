"""Resource estimate of a job from its spec: tiers tried in order, and the user's request above them.

Ideal: every resource is predicted from the job's model and data, with its uncertainty. Departure: until
models are trained, the estimate is that of earlier runs of the same command, else a default. Each tier may
leave fields open; the next one fills them, and the last leaves none open. The user's request takes precedence
field by field.
"""

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    MAX_GPUS_PER_NODE,
    MAX_TEXT,
    WHOLE_GPU,
    Estimate,
    ResourceVector,
)
from penstock_services.estimator.core.records.history import MAX_VALUE, History, Runs, key_of

TierName = Literal["user", "history", "model", "nearest", "default"]
NewKind = Literal["network", "gpu_model"]

# The default must start a small job on every node, since a job that fits nowhere ends without having run,
# while
# one with too few cores merely runs slowly, once: its next run is estimated from this one's use. It is not
# cut to
# the smallest node known: nodes come and go, and an estimate must not depend on when it was made.
DEFAULT_GPUS = 1  # whole: whether it could share one is not known
DEFAULT_CORES = 1  # see above
DEFAULT_HOST_MEMORY_MIB = 2_048  # a framework and a loader's buffers
DEFAULT_GPU_MEMORY_MIB = 0  # no demand on the GPU's size; it is not shared, so all of its memory is the job's
DEFAULT_UTILISATION_PERCENT = 100.0  # as of a job that needs the whole GPU
DEFAULT_CONFIDENCE = 0.1  # between no run and one run
PARAMETER_SERVER = ResourceVector(gpus=0, cores=1, host_memory_mib=1_024, gpu_utilisation_percent=0.0)
NO_SERVER = ResourceVector()

MEMORY_PERCENT = 110  # of the largest run: too little memory kills a job, too much only wastes some
CORES_HEADROOM = 1.25  # over busy cores: a run never exceeds its allocation, so it must be able to grow
PRIOR_RUNS = 2  # weight of the prior, in runs: see `confidence`
SAME_ITERATIONS = 0.05  # relative difference up to which earlier runs' time counts: runs scatter more
MAX_MEMORY_MIB = 1 << 30  # the wire types' range
LAST_DATE_MS = 253_402_300_799_999  # the end of year 9999


class Guess(NamedTuple):
    """One tier's answer about a worker; None: the field is left open."""

    tier: TierName
    confidence: float
    source: str
    gpus: int | None = None
    cores: int | None = None
    host_memory_mib: int | None = None
    gpu_memory_mib: int | None = None
    gpu_utilisation_percent: float | None = None
    run_ms: int | None = None
    launch_ms: int | None = None
    model_version: str | None = None
    server_memory_mib: int | None = None
    """Of a parameter server; None: the default."""
    first_of_kind: tuple[NewKind, ...] = ()
    """As in `Estimate`."""
    raised: str = ""
    """Text about memory that was raised after a task ran out of it; it follows every other source."""
    partly: str = ""
    """Not empty: it answers only some fields, with this as their source, and sets neither the estimate's tier
    nor its confidence."""


class Tier(Protocol):
    """One way to estimate. Learned models and nearest neighbours become further tiers."""

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        """What this tier knows about the job; None if nothing. `key`: `key_of(spec)`."""
        ...


DEFAULT = Guess(  # the last tier: always answers every field but the run time
    tier="default",
    confidence=DEFAULT_CONFIDENCE,
    source="default: nothing is known yet about this owner, command, model and batch size",
    gpus=DEFAULT_GPUS,
    cores=DEFAULT_CORES,
    host_memory_mib=DEFAULT_HOST_MEMORY_MIB,
    gpu_memory_mib=DEFAULT_GPU_MEMORY_MIB,
    gpu_utilisation_percent=DEFAULT_UTILISATION_PERCENT,
)


class HistoryTier:
    """Medians of the runs with the same key; of memory the maximum, since it is a bound and not a mean."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._known: WeakKeyDictionary[Runs, tuple[int, Guess]] = WeakKeyDictionary()

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        runs = self._history.get(key)
        if not runs:
            return None
        version, found = self._known.get(runs, (0, DEFAULT))
        if version != runs.version:
            found = guess_from(runs)
            self._known[runs] = (runs.version, found)
        if spec.iterations is not None and not _as_long(runs, spec.iterations):
            return found._replace(run_ms=None)
        return found


def _as_long(runs: Runs, iterations: int) -> bool:
    """Whether these runs had about so many iterations; also if they reported none."""
    had = runs.column("iterations")
    return not had or abs(median(had) - iterations) <= SAME_ITERATIONS * iterations


def guess_from(runs: Runs) -> Guess:
    """The estimate from these runs (at least one)."""
    count, newest_ms = len(runs), runs.column("ended_ms")[-1]
    source = (
        f"median of {count} run{'s' if count > 1 else ''} with the same owner, command, model and batch "
        f"size, newest ended {date(newest_ms)} (ledger seq {runs.column('seq')[-1]:.0f}); memory: the "
        "largest of them + 10 %"
    )
    cores = _of(runs, "busy_cores", median)
    return Guess(
        tier="history",
        confidence=confidence(count, max(_spread(runs, "run_ms"), _spread(runs, "host_memory_mib"))),
        source=source,
        gpus=_whole(_of(runs, "gpus", median), 0, MAX_GPUS_PER_NODE),
        cores=None if cores is None else _whole(cores * CORES_HEADROOM, 1, MAX_CORES_PER_NODE),
        host_memory_mib=promised_memory_mib(_of(runs, "host_memory_mib", max)),
        gpu_memory_mib=promised_memory_mib(_of(runs, "gpu_memory_mib", max)),
        gpu_utilisation_percent=_percent(_of(runs, "gpu_utilisation_percent", median)),
        run_ms=_whole(_of(runs, "run_ms", median), 0, MAX_VALUE),
        launch_ms=_whole(_of(runs, "launch_ms", median), 0, MAX_VALUE),
    )


def confidence(runs: int, spread: float) -> float:
    """Confidence of an estimate from `runs` runs, 0–1: n / (n + 2) / (1 + spread).

    The first factor is the weight of n runs against a prior of PRIOR_RUNS runs, as in the mean of a
    posterior: 1/3 after one run, 0.71 after five, 0.94 after 32. The second halves it when the typical
    deviation is as large as the median. `spread`: median absolute deviation / median, ≥ 0; one outlier
    does not change it.
    """
    return round(runs / (runs + PRIOR_RUNS) / (1 + spread), 3)


def date(time_ms: float) -> str:
    """Ledger time as text for users, UTC to the second."""
    return datetime.fromtimestamp(min(time_ms, LAST_DATE_MS) / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _of(runs: Runs, name: str, statistic: Callable[[Sequence[float]], float]) -> float | None:
    values = runs.column(name)
    return statistic(values) if values else None


def _spread(runs: Runs, name: str) -> float:
    values = runs.column(name)
    middle = median(values) if values else 0.0
    return median(abs(value - middle) for value in values) / middle if middle > 0 else 0.0


def _whole(value: float | None, low: int, high: int) -> int | None:
    """Rounded up to a whole number within the type's range."""
    return None if value is None else min(max(math.ceil(value), low), high)


def promised_memory_mib(largest_mib: float | None) -> int | None:
    """The memory to promise a job if similar runs used so much."""
    return None if largest_mib is None else _whole(largest_mib * MEMORY_PERCENT / 100, 0, MAX_MEMORY_MIB)


def _percent(value: float | None) -> float | None:
    return None if value is None else min(max(value, 0.0), 100.0)


ASKABLE = ("gpus", "cores", "host_memory_mib", "gpu_memory_mib")
"""Fields of a request that leaves nothing open. Bandwidth is not among them: nothing measures it yet."""
OPEN = (
    "gpus",
    "cores",
    "host_memory_mib",
    "gpu_memory_mib",
    "gpu_utilisation_percent",
    "run_ms",
    "launch_ms",
)
"""Fields that a tier may leave to the next one."""


Bounding = Callable[[JobSpec, bytes, Guess], Guess]
"""Bounds every learned value, before the user's request; see `bounds.Bounds`."""


def estimate(
    spec: JobSpec, tiers: Sequence[Tier], key: bytes | None = None, bounds: Bounding | None = None
) -> Estimate:
    """The job's resources, per worker of a moldable job with its fewest workers, which have the largest
    batches. `tiers` in order of precedence; fields that all of them leave open get the default.

    Confidence, tier and source are those of the first that answered, or the user's if the request left
    nothing open.
    """
    key = key_of(spec) if key is None else key
    spec = spec.least
    asked, found = spec.resources, merge(spec, tiers, key)
    if bounds is not None:
        found = bounds(spec, key, found)
    worker = worker_of(spec, found)
    named = [name for name in ASKABLE if getattr(asked, name) is not None]
    all_asked = all(name in named for name in (ASKABLE if worker.gpus else ASKABLE[:3]))
    source = "the user asked for all of it" if all_asked else found.source
    if named and not all_asked:
        source = f"{', '.join(named)}: asked for by the user; else {source}"
    first = () if all_asked else found.first_of_kind
    new = (
        f"first of its kind: no run of this {' or '.join(first).replace('gpu_model', 'GPU model')}"
        if first
        else ""
    )
    source = "; ".join(part for part in (source, new, found.partly, found.raised) if part)[:MAX_TEXT]
    return Estimate(
        worker=worker,
        parameter_server=server_of(spec, found),
        run_ms=found.run_ms,
        confidence=1.0 if all_asked else found.confidence,
        tier="user" if all_asked else found.tier,
        source=source,
        model_version=None if all_asked and not found.partly else found.model_version,
        first_of_kind=first,
        launch_ms=found.launch_ms if spec.prelaunch else None,
    )


def worker_of(spec: JobSpec, found: Guess) -> ResourceVector:
    """Resources of a worker: as requested, else as guessed, else the default."""
    asked = spec.resources
    share = asked.gpu_share_milli or WHOLE_GPU

    def pick(name: str) -> int:
        values = getattr(asked, name), getattr(found, name), getattr(DEFAULT, name)
        return int(next(value for value in values if value is not None))

    gpus = 1 if share < WHOLE_GPU else pick("gpus")
    percent = found.gpu_utilisation_percent
    return ResourceVector(
        gpus=gpus,
        cores=pick("cores"),
        host_memory_mib=pick("host_memory_mib"),
        gpu_memory_mib=pick("gpu_memory_mib") if gpus else 0,
        gpu_utilisation_percent=(DEFAULT_UTILISATION_PERCENT if percent is None else percent)
        if gpus
        else 0.0,
        bandwidth_mbps=asked.bandwidth_mbps or 0,
        gpu_share_milli=share,
    )


def server_of(spec: JobSpec, found: Guess) -> ResourceVector:
    """Resources of a parameter server; none in a job without servers."""
    if not spec.parameter_servers:
        return NO_SERVER
    if found.server_memory_mib is None:
        return PARAMETER_SERVER
    return replace(PARAMETER_SERVER, host_memory_mib=found.server_memory_mib)


def merge(spec: JobSpec, tiers: Sequence[Tier], key: bytes) -> Guess:
    """The first complete answer, with its open fields filled in by all others and by the default, in order.

    `partly`: the sources of the partial answers that filled in a field.
    """
    guesses = [found for tier in tiers if (found := tier.guess(spec, key)) is not None]
    guesses.append(DEFAULT)
    lead = next(guess for guess in guesses if not guess.partly)
    merged: dict[str, Any] = {}
    versions: dict[str, str | None] = {}
    for name in OPEN:
        source = next((guess for guess in guesses if getattr(guess, name) is not None), DEFAULT)
        merged[name] = getattr(source, name)
        if name == "gpu_memory_mib":
            merged["first_of_kind"] = source.first_of_kind if spec.resources.gpu_memory_mib is None else ()
        if source.partly:
            versions[source.partly] = source.model_version
    if lead.tier == "default" and spec.model is not None:
        merged["first_of_kind"] = ("network",)
    known = (version for version in (lead.model_version, *versions.values()) if version is not None)
    return lead._replace(partly="; ".join(versions), model_version=next(known, None), **merged)
