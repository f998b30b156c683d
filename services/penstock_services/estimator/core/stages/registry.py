"""Registry of stage profiles per ⟨model, batch, GPUs⟩ measured on the cell's jobs, and which of them to
publish.

Source: Muri §5: a profile is measured once and reused for every job like it. Departures: the paper has one
measurer, Penstock has many owners. Each owner's iterations are averaged; over owners the median counts, field
by field, so that one of three or more never moves it outside of the others' range. Of two owners neither can
outvote the other: the first to measure counts until there is a third. A profile is published again when a
stage has changed by more than 10 %.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from penstock.ledger.derived.stages import near_counts
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import WHOLE_GPU, StageTimes
from penstock_services.estimator.core.learning.limits import STAGE_KEYS, STAGE_KEYS_OF_ONE, STAGE_OWNERS
from penstock_services.estimator.core.learning.owner_table import NO_OWNER, OwnerTable
from penstock_services.estimator.core.records.runs import JobInfo
from penstock_services.estimator.core.stages.profile import (
    MIN_ITERATIONS,
    Sample,
    StageKey,
    StageProfile,
    mean_profile,
    stage_profile,
)

# a larger change of any stage is published. Source: Muri Fig. 14: noise of 0.2 costs under 1 % of JCT
MOVED = 0.1
SMALL = 0.01  # of the iteration: a shorter stage counts as so long, or its noise would be published
MIN_ITERATION_MS, MAX_ITERATION_MS = 0.01, 3_600_000.0  # outside, a clock or a count is wrong
MAX_USAGE = 1e15  # of any resource in any unit: the fastest machine has fewer bytes per second


class Owned(NamedTuple):
    """One row as it is stored: one owner's measurements of a key.
    NO_OWNER: the profile that was published last."""

    key: StageKey
    owner: str
    profile: StageProfile
    seq: int = 0
    """Number of the ledger record that changed it last."""


class StageRegistry:
    """`measured` and `published` are ledger facts; `news` is what to publish."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        """Reason → measurements that were rejected."""
        self._profiles: OwnerTable[StageKey, StageProfile] = OwnerTable(
            STAGE_KEYS, STAGE_KEYS_OF_ONE, STAGE_OWNERS
        )
        """A key's owners in the order in which they first measured; NO_OWNER's is the published profile."""
        self._changed: OrderedDict[StageKey, str | None] = OrderedDict()
        """Key → id of the event that changed it last, where it is known."""

    def __len__(self) -> int:
        return len(self._profiles)

    def measured(
        self,
        info: JobInfo,
        gpus: int,
        share_milli: int,
        fact: external_events.StagesMeasured,
        cause: str | None = None,
        seq: int = 0,
        *,
        disturbed: bool = False,
    ) -> Owned | None:
        """One worker's samples; `gpus` of all workers, `cause`: id of the event, `seq`: its ledger record.
        `disturbed`: there was a neighbour, a change of cores or a cap while they were taken.

        Returns the owner's updated profile, None if the samples were rejected.
        """
        why, profile = ("it was disturbed", None) if disturbed else _profile(info, gpus, share_milli, fact)
        if profile is None or info.model is None or info.batch_size is None:
            self.rejected[why] += 1
            return None
        key = StageKey(info.model, info.batch_size, gpus)
        known = self._profiles.get(key, info.owner)
        if known is None and len(self._profiles.of_key(key).keys() - {NO_OWNER}) >= STAGE_OWNERS:
            self.rejected["enough owners have measured it"] += 1
            return None
        profile = profile if known is None else mean_profile(known, profile)
        row = self.put(Owned(key, info.owner, profile, seq))
        self._changed[key] = cause
        return row

    def put(self, row: Owned) -> Owned:
        """A row as stored or updated. Rows of a key in the order of first measurement, NO_OWNER's last."""
        if row.owner != NO_OWNER:
            self._changed[row.key] = None
        elif row.key not in self._profiles:
            return row
        self._profiles.put(row.key, row.owner, row.profile, moves=False)
        return row

    def published(self, fact: StagesProfiled, seq: int = 0) -> Owned | None:
        """Records a published profile; None for a key that is not known here (any more)."""
        key = StageKey(fact.model, fact.batch_size, fact.gpus)
        if key not in self._profiles:
            return None
        profile = StageProfile(*(getattr(fact, name) for name in StageProfile._fields))
        return self.put(Owned(key, NO_OWNER, profile, seq))

    def get(self, key: StageKey) -> StageProfile | None:
        """The profile to reuse; None: too few iterations were measured."""
        rows = self._profiles.of_key(key).items()
        return combined(
            [row for owner, row in rows if owner != NO_OWNER and row.iterations >= MIN_ITERATIONS]
        )

    def times(self, spec: JobSpec, gpus_of_worker: int) -> StageTimes | None:
        """Stage times of a job's iteration on as many GPUs as it asks for: the latest published ones, of as
        many, else of half or twice as many. None: nothing was measured of this model and batch size. O(1)."""
        if spec.model is None or spec.batch_size is None:
            return None
        gpus = spec.workers * gpus_of_worker
        for count in (gpus, *near_counts(gpus)):
            known = self._profiles.get(StageKey(spec.model, spec.batch_size, count), NO_OWNER)
            if known is not None:
                storage, cpu, gpu, network, _, iteration, _ = known
                return StageTimes(
                    storage_ms=storage, cpu_ms=cpu, gpu_ms=gpu, network_ms=network, iteration_ms=iteration
                )
        return None

    def news(self) -> Iterator[tuple[StagesProfiled, str | None]]:
        """Profiles that are new or differ from the published ones, each once, and the id of the event that
        led to it where that is known; they count as published from then on."""
        changed, self._changed = self._changed, OrderedDict()
        for key, cause in changed.items():
            profile = self.get(key)
            if profile is not None and moved(self._profiles.get(key, NO_OWNER), profile):
                self._profiles.put(key, NO_OWNER, profile, moves=False)
                fields = profile._asdict()
                event = StagesProfiled(model=key.model, batch_size=key.batch, gpus=key.gpus, **fields)
                yield event, cause


def combined(owners: Sequence[StageProfile]) -> StageProfile | None:
    """One profile combined from the owners' profiles, in the order of first measurement; None without any."""
    if not owners:
        return None
    if len(owners) < 3:
        return owners[0]
    parts = [median(values) for values in zip(*(owner[:5] for owner in owners), strict=True)]
    storage, cpu, gpu, network, idle = parts
    return StageProfile(
        storage, cpu, gpu, network, idle, sum(parts), sum(owner.iterations for owner in owners)
    )


def moved(before: StageProfile | None, now: StageProfile) -> bool:
    """Whether a stage, or idling, differs by more than `MOVED` from before;
    also where there was no profile."""
    if before is None:
        return True
    least = SMALL * before.iteration_ms
    return any(abs(new - old) > MOVED * max(old, least) for old, new in zip(before[:5], now[:5], strict=True))


def _profile(
    info: JobInfo, gpus: int, share_milli: int, fact: external_events.StagesMeasured
) -> tuple[str, StageProfile | None]:
    """(reason of the rejection, None) or ("", the profile). The reasons are few, since they are counted."""
    if info.model is None or info.batch_size is None:
        return "the job names no model or no batch size", None
    if gpus < 1:
        return "the job has no GPU", None
    if share_milli < WHOLE_GPU:
        return "the job shares its GPU", None
    samples = [Sample(one.lasted_ms, (one.storage, one.cpu, one.gpu, one.network)) for one in fact.samples]
    if not any(value > 0 for sample in samples for value in sample.usage):
        return "nothing was used", None
    if any(value > MAX_USAGE for sample in samples for value in sample.usage):
        return "no machine has so much", None
    found = stage_profile(samples, fact.iterations)
    if not MIN_ITERATION_MS <= found.iteration_ms <= MAX_ITERATION_MS:
        return "no iteration lasts so long or so short", None
    return "", found
