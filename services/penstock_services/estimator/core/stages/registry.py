"""Stages per ⟨model, batch, GPUs⟩ as the cell's jobs measured them, and which of them are to be told.

Source: Muri §5: a profile is measured once and reused for every job like it. Departures: the paper has one measurer,
we have many owners. Each owner's iterations are averaged; over owners the median counts, field by field, so that one
of three or more never moves it out of what the others measured. Of two owners neither can outvote the other: the one
who measured first counts until there is a third. A profile is told again when a stage has moved by more than 10 %.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from penstock.model import external_events
from penstock.model.types import WHOLE_GPU
from penstock_services.estimator.core.runs import About
from penstock_services.estimator.core.stages.profile import (
    LEAST_ITERATIONS,
    Sample,
    StageKey,
    StageProfile,
    mean_profile,
    stage_profile,
)

MAX_KEYS = 2_000  # least recently measured ones go; with their owners about 15 MB when full
KEYS_PER_OWNER = 500  # so that one owner's sweep pushes out no more than a quarter
OWNERS_PER_KEY = 16  # beyond, further owners add nothing: sixteen say enough
MOVED = (
    0.1  # a change of any stage by more is told. Source: Muri Fig. 14: noise of 0.2 costs under 1 % of JCT
)
SMALL = 0.01  # of the iteration: a stage below is judged as if it were so long, or its noise would be told
LEAST_ITERATION_MS, MOST_ITERATION_MS = 0.01, 3_600_000.0  # beyond, a clock or a count is broken
MOST_USAGE = 1e15  # of any resource in any unit: bytes a second of the fastest machine are fewer


class Owned(NamedTuple):
    """One row as it is kept: what one owner measured of a key. Owner "": what the cell was told last."""

    key: StageKey
    owner: str
    profile: StageProfile


class News(NamedTuple):
    """What the cell is to be told, and the id of the event that led to it, where that is known."""

    key: StageKey
    profile: StageProfile
    cause: str | None

    def event(self) -> external_events.StagesProfiled:
        return external_events.StagesProfiled(
            model=self.key.model, batch_size=self.key.batch, gpus=self.key.gpus, **self.profile._asdict()
        )


class StageLog:
    """The fold. `measured` and `told` are facts of the ledger; `news` is what to tell the cell."""

    def __init__(self) -> None:
        self.set_aside: Counter[str] = Counter()
        """Reason → measurements that teach nothing."""
        self._owners: OrderedDict[StageKey, OrderedDict[str, StageProfile]] = OrderedDict()
        """Owners in the order in which they first measured."""
        self._keys_of: dict[str, OrderedDict[StageKey, None]] = {}
        self._told: dict[StageKey, StageProfile] = {}
        self._changed: OrderedDict[StageKey, str | None] = OrderedDict()
        """With the id of the event that changed them last, where it is known."""

    def __len__(self) -> int:
        return len(self._owners)

    def measured(
        self,
        about: About,
        gpus: int,
        share_milli: int,
        fact: external_events.StagesMeasured,
        cause: str | None = None,
    ) -> Owned | None:
        """One worker's samples; `gpus` of all workers, `cause`: id of the event.

        Returns the owner's profile as it now is, None if they taught nothing.
        """
        why, profile = _profile(about, gpus, share_milli, fact)
        if profile is None or about.model is None or about.batch_size is None:
            self.set_aside[why] += 1
            return None
        key = StageKey(about.model, about.batch_size, gpus)
        owners = self._owners.get(key) or OrderedDict[str, StageProfile]()
        known = owners.get(about.owner)
        if known is None and len(owners) >= OWNERS_PER_KEY:
            self.set_aside["enough owners have measured it"] += 1
            return None
        row = self.put(Owned(key, about.owner, profile if known is None else mean_profile(known, profile)))
        self._changed[key] = cause
        return row

    def put(self, row: Owned) -> Owned:
        """A row as it was kept, or as it has become. Rows of a key in the order of first measurement, what was told last."""
        if not row.owner:
            if row.key in self._owners:
                self._told[row.key] = row.profile
            return row
        self._owners.setdefault(row.key, OrderedDict())[row.owner] = row.profile
        self._owners.move_to_end(row.key)
        mine = self._keys_of.setdefault(row.owner, OrderedDict())
        mine[row.key] = None
        mine.move_to_end(row.key)
        self._changed[row.key] = None
        if len(mine) > KEYS_PER_OWNER:
            self._drop(next(iter(mine)), row.owner)
        if len(self._owners) > MAX_KEYS:
            oldest = next(iter(self._owners))
            for owner in tuple(self._owners[oldest]):
                self._drop(oldest, owner)
        return row

    def told(self, fact: external_events.StagesProfiled) -> Owned | None:
        """What the cell was told; None for a key that is not known here (any more)."""
        key = StageKey(fact.model, fact.batch_size, fact.gpus)
        if key not in self._owners:
            return None
        profile = StageProfile(
            fact.storage_ms, fact.cpu_ms, fact.gpu_ms, fact.network_ms, fact.idle_ms, fact.iteration_ms, fact.iterations
        )  # fmt: skip
        return self.put(Owned(key, "", profile))

    def get(self, key: StageKey) -> StageProfile | None:
        """The profile to reuse; None: too few iterations were measured."""
        owners = self._owners.get(key)
        if owners is None:
            return None
        return combined([row for row in owners.values() if row.iterations >= LEAST_ITERATIONS])

    def news(self) -> Iterator[News]:
        """Profiles that are new or differ from what was told, each once; they count as told from then on."""
        changed, self._changed = self._changed, OrderedDict()
        for key, cause in changed.items():
            profile = self.get(key)
            if profile is not None and moved(self._told.get(key), profile):
                self._told[key] = profile
                yield News(key, profile, cause)

    def _drop(self, key: StageKey, owner: str) -> None:
        owners, mine = self._owners[key], self._keys_of[owner]
        del owners[owner], mine[key]
        if not mine:
            del self._keys_of[owner]
        if not owners:
            del self._owners[key]
            self._told.pop(key, None)
            self._changed.pop(key, None)


def combined(owners: Sequence[StageProfile]) -> StageProfile | None:
    """One profile of what owners measured, in the order of first measurement; None without any."""
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
    """Whether a stage, or idling, differs by more than `MOVED` from what it was; also where there was nothing."""
    if before is None:
        return True
    least = SMALL * before.iteration_ms
    return any(abs(new - old) > MOVED * max(old, least) for old, new in zip(before[:5], now[:5], strict=True))


def _profile(
    about: About, gpus: int, share_milli: int, fact: external_events.StagesMeasured
) -> tuple[str, StageProfile | None]:
    """(why it teaches nothing, None) or ("", the profile). The reasons are few, since they are counted."""
    if about.model is None or about.batch_size is None:
        return "the job names no model or no batch size", None
    if gpus < 1:
        return "the job has no GPU", None
    if share_milli < WHOLE_GPU:
        return "the job shares its GPU", None
    samples = [Sample(one.lasted_ms, (one.storage, one.cpu, one.gpu, one.network)) for one in fact.samples]
    if not any(value > 0 for sample in samples for value in sample.usage):
        return "nothing was used", None
    if any(value > MOST_USAGE for sample in samples for value in sample.usage):
        return "no machine has so much", None
    try:
        found = stage_profile(samples, fact.iterations)
    except ValueError:
        return "no numbers", None
    if not LEAST_ITERATION_MS <= found.iteration_ms <= MOST_ITERATION_MS:
        return "no iteration lasts so long or so short", None
    return "", found
