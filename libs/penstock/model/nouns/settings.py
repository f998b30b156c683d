"""Settings of a cell: inputs of decisions that are in no log."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.model.nouns.types import (
    MAX_CORES_PER_NODE,
    Identifier,
    Milliseconds,
    Value,
)

OWN_PROFILE = "penstock"
"""The product's own profile: of a cell whose operator names none, and of a cell before its first term.
`PlacerSettings.profile` has the default with which ledgers were written."""
MAX_BACKFILL_WINDOW = 4_096
MAX_OVERTAKES = 1_000_000
MAX_BATCH_WINDOW_MS = 60_000
MAX_PRELAUNCH_WAIT_MS = 3_600_000
MAX_BATCH_ARRIVALS = 256  # arrival times that the state holds
MAX_PROFILE_SETTINGS = 65_536  # characters; 256 typical tasks, the longest that a profile has, take 30,000


class Convergence(Value, frozen=True, kw_only=True):
    """When a job's loss counts as converging, for profiles `penstock`, `balance` and
    `specon`. Source: SpeCon §VI-C, the settings of
    most experiments."""

    OMITTED = ("alpha", "interval_ms")

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.01
    """Fraction of the range of losses so far: a job that gains more within an interval progresses."""
    interval_ms: Annotated[int, Meta(ge=1_000, le=86_400_000)] = 30_000


class Contention(Value, frozen=True, kw_only=True):
    """Settings of the contention-guard. Source: CODA §V-B, V-D."""

    OMITTED = ("search", "users_cores", "eliminate", "throttle")

    search: Literal["doubling", "walk", "none"] = "doubling"
    """Search for the number of cores of running training jobs. walk: in steps of one, as in the source.
    doubling: ours, the fewest cores with 95 % of the speed. none: the cores of the placement remain."""
    users_cores: Literal["respect", "at_least", "override"] = "respect"
    """Whether a number of cores that the user named is changed, too. respect: no. at_least: ours, and that of
    profile `penstock`, a training job may get more cores where that makes it faster, never fewer. override:
    as in the source, more or fewer."""
    eliminate: bool = True
    """Whether jobs without GPUs are throttled where they slow down a training job."""
    throttle: Literal["predicted", "half"] = "predicted"
    """Number of cores taken from such a job at once where threads of the training job wait for cores. half:
    as in the source. predicted: ours, as many as the training job's slowdown requires, at least half."""


class Coda(Value, frozen=True, kw_only=True):
    """Resource arrays, for profiles `coda` and `penstock`. Source: CODA §V-C; it gives no numbers."""

    OMITTED = ("cores_per_gpu", "history_ms", "max_reclaims")
    FORMER = ("patience_ms",)

    cores_per_gpu: Annotated[float, Meta(ge=0, le=MAX_CORES_PER_NODE)] = 3.0
    """Cores reserved for each GPU until there is a history."""
    history_ms: Annotated[int, Meta(ge=60_000, le=31 * 86_400_000)] = 86_400_000
    """Length of a window of the history; sizes are computed from the present window and the one before."""
    max_reclaims: Annotated[int, Meta(ge=0, le=100)] = 3
    """Maximum number of times that a job without GPUs returns borrowed cores; after that it retains them."""


Stage = Literal[
    "deadlines",
    "backfill",
    "bursts",
    "groups",
    "moves",
    "prelaunch",
    "cores",
    "eliminator",
    "reclaim",
    "make_way",
]
"""Stages of profile `penstock`; each can be left out."""


def own_object(given: object) -> dict[str, Any]:
    """A profile's own settings, given as an object or as the text of one; an empty text has none. Raises
    ValueError."""
    found = given
    if isinstance(given, str):
        try:
            found = msgspec.json.decode(given) if given else {}
        except msgspec.DecodeError as error:
            raise ValueError(f"the text of a JSON object, not {given[:80]!r}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a JSON object, not {str(given)[:80]!r}")
    return found


def _is_object(text: str) -> None:
    """Raises ValueError."""
    own_object(text)


def own_settings_apart(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `PlacerSettings` with the profile's own settings in `profile_settings`, where they stood
    beside it.

    Earlier releases had them as fields (`FORMER`), and users give them by these names. Pure; an object that
    has none of them stays as it is. Raises ValueError or TypeError for what was never of this form.
    """
    found = {**settings}
    own = {name: found.pop(name) for name in PlacerSettings.FORMER if name in found}
    if isinstance(arrays := found.get("coda"), dict):
        own |= {name: arrays[name] for name in Coda.FORMER if name in arrays}
        found["coda"] = {name: value for name, value in arrays.items() if name not in Coda.FORMER}
    if own:
        own = {**own_object(found.get("profile_settings", "")), **own}
        found["profile_settings"] = msgspec.json.encode(own, order="sorted").decode()
    return found


class PlacerSettings(Value, frozen=True, kw_only=True, cache_hash=True):
    """Everything outside the log that a decision depends on; recorded at the start of each term."""

    OMITTED = (
        "profile_settings",
        "lease_ms",
        "batch_window_ms",
        "batch_arrivals",
        "share_gpus",
        "convergence",
        "coda",
        "prelaunch_wait_ms",
        "contention",
        "without",
    )
    FORMER = ("batch_exact", "genie", "grouping", "queue_limits_gpu_s", "typical_tasks")
    RULES = MappingProxyType({"profile_settings": _is_object})

    profile: Identifier = "liquid"
    profile_settings: Annotated[str, Meta(max_length=MAX_PROFILE_SETTINGS)] = ""
    """The profile's own settings, as the text of a JSON object that its definition checks; empty: it has
    none, or their defaults."""
    seed: Annotated[int, Meta(ge=0, le=1 << 53)] = 0
    network_weight: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """λ of Liquid §5.2 eq. 4."""
    backfill_window: Annotated[int, Meta(ge=1, le=MAX_BACKFILL_WINDOW)] = 64
    """Number of jobs from the head of the queue that may be tried."""
    max_overtakes: Annotated[int, Meta(ge=0, le=MAX_OVERTAKES)] = 256
    """Number of jobs that may be backfilled before the head of the queue; after that all jobs behind it
    wait."""
    launch_timeout_ms: Annotated[int, Meta(ge=1)] = 60_000
    """An order unanswered for this long makes its node suspect."""
    lease_ms: Milliseconds = 600_000
    """Lease of tasks placed from now on: a node that has not reached the log for this long ends them. 0: they
    continue to run, and a silent node holds them until it is fenced."""
    unschedulable_grace_ms: Annotated[int, Meta(ge=0)] = 300_000
    """A job that does not fit even the empty cell ends after this long."""
    batch_window_ms: Annotated[int, Meta(ge=0, le=MAX_BATCH_WINDOW_MS)] = 0
    """Maximum time that jobs that arrive fast wait for a batch plan; 0: no job waits."""
    batch_arrivals: Annotated[int, Meta(ge=2, le=MAX_BATCH_ARRIVALS)] = 8
    """Number of arrivals within `batch_window_ms` that counts as fast."""
    prelaunch_wait_ms: Annotated[int, Meta(ge=0, le=MAX_PRELAUNCH_WAIT_MS)] = 60_000
    """Maximum time that a job with `prelaunch`, launched while another one holds its GPUs, waits beyond that
    one's expected end; then it is requeued. 0: no job launches before its GPUs are free."""
    freeze_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """If more than this share of nodes is lost within `freeze_window_ms`: freeze (LAW 5)."""
    freeze_window_ms: Annotated[int, Meta(ge=0)] = 60_000
    share_gpus: Literal["never", "fits", "learned"] = "never"
    """Whether jobs without a requested share of a GPU get one where their estimate permits it
    (`penstock.ledger.derived.gpu_shares`). never: whole GPUs. fits: any jobs that fit share. learned: except
    jobs that were measured to slow each other down too much (`penstock.scheduling.place.measured_pairs`)."""
    convergence: Convergence = Convergence()
    """For profiles `penstock`, `balance` and `specon`."""
    contention: Contention | None = None
    """For any profile: switches the contention-guard on, with these settings. None: as the profile has it."""
    coda: Coda = Coda()
    """For profiles `coda` and `penstock`."""
    without: Annotated[tuple[Stage, ...], Meta(max_length=16)] = ()
    """Stages that profile `penstock` leaves out, for ablation. deadlines: GENIE's order and shapes, and
    make_way with them; backfill: nodes reserved for the job that has waited longest; bursts: plans by the
    grouping genetic algorithm; groups: interleaving, and stops for it; moves: load balancing; prelaunch:
    launches before GPUs are free; cores: the search for the number of cores of running training jobs;
    eliminator: throttling of jobs that slow one down; reclaim: cores reserved for GPUs, which jobs without
    GPUs borrow and return; make_way: running jobs that make way for urgent ones and those with a deadline,
    which needs deadlines."""


BEFORE_ANY_TERM = PlacerSettings(profile=OWN_PROFILE)
"""Of a cell that has none yet."""
