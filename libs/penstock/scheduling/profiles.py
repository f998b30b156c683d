"""Scheduling profiles: one table from names to combinations of policies; no code inspects a name.

A profile is composed of stages (`penstock.scheduling.stages.protocols.Profile`), and fixes the settings that
are part of its definition.
"""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.model.nouns.settings import (
    MAX_BACKFILL_WINDOW,
    MAX_OVERTAKES,
    Contention,
    PlacerSettings,
    Stage,
)
from penstock.scheduling.acting.guard import Guard, guard_of
from penstock.scheduling.acting.load_balance import LoadBalance
from penstock.scheduling.bursts.burst import Burst
from penstock.scheduling.groups.fair_interleave import FairInterleave
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.make_room.array_reclaim import ArrayReclaim
from penstock.scheduling.make_room.make_way import MakeWay
from penstock.scheduling.make_room.reservation import Reservation
from penstock.scheduling.order.deadline_order import DeadlineOrder
from penstock.scheduling.order.fair import FairResponse
from penstock.scheduling.order.genie import Genie
from penstock.scheduling.place.lending import Lending
from penstock.scheduling.place.liquid import Liquid, PairCost
from penstock.scheduling.place.moldable import ShortestStep
from penstock.scheduling.place.sharing import ByMeasuredPairs
from penstock.scheduling.place.together import Together
from penstock.scheduling.service import Key
from penstock.scheduling.stages.protocols import Policy, Profile
from penstock.scheduling.stages.regroup import Regroup
from penstock_papers.baselines.baselines import Even, FirstFit, MostFree, RandomFit
from penstock_papers.baselines.burst_order import CriticalThenShortest
from penstock_papers.baselines.drf import DominantResourceFairness
from penstock_papers.baselines.fgd import FragmentationGradient
from penstock_papers.baselines.hived import BuddyCells
from penstock_papers.baselines.key_order import KeyOrder
from penstock_papers.baselines.kubernetes import MAX_SCORED, Kubeflow, LeastAndBalanced
from penstock_papers.baselines.ordered import Ordered, shortest_remaining_service, shortest_remaining_time
from penstock_papers.baselines.packing import BestFit, Clustering, DotProduct, Packing
from penstock_papers.baselines.scored import ScoredFit
from penstock_papers.baselines.tiresias import Tiresias
from penstock_papers.coda.array_order import ArrayOrder
from penstock_papers.coda.array_place import ArrayPlace
from penstock_papers.muri.muri import least_attained_service, muri_l, muri_s
from penstock_papers.specon import SpeCon

CODA = Contention(search="walk", users_cores="override", throttle="half")
"""The source's values; the cell's setting `contention` overrides them."""
LOSES_MS = 3_600_000
"""Under `penstock` borrowed cores are reclaimed from a job that does not save only within an hour of its
placement: so it repeats at most an hour of work."""
Make = Callable[[PlacerSettings], Profile]


def placed_by(policy: Callable[[PlacerSettings], Policy], *, prelaunch: bool = False) -> Make:
    """First come, first served with backfill; only the place stage differs. `prelaunch`: see
    `Profile.prelaunch`."""

    def make(settings: PlacerSettings) -> Profile:
        found = policy(settings)
        return Profile(found.name, found, prelaunch=prelaunch)

    return make


def ordered_by(name: str, key: Key, *, preemptive: bool) -> Make:
    """Preemption by key, with first fit."""
    return lambda settings: Profile(name, FirstFit(name), preempt=Ordered(key, preemptive=preemptive))


def own_order(policy: Callable[[], Any]) -> Make:
    """One object is both place and order stage."""

    def make(settings: PlacerSettings) -> Profile:
        both = policy()
        return Profile(both.name, both, order=both)

    return make


def least_attained(name: str, where: Callable[[str], Policy], *, strict_fifo: bool = False) -> Make:
    """Tiresias's queues; `where`: the place stage."""
    return lambda settings: Profile(
        name,
        where(name),
        preempt=Tiresias(settings.queue_limits_gpu_s, strict_fifo=strict_fifo),
        beside_stops=not strict_fifo,
    )


def penstock(settings: PlacerSettings) -> Profile:
    """All stages together: jobs with the least slack to their deadline first, then tenants below their share,
    then the highest response ratio; compact gangs; backfill behind a reservation; bursts by the grouping
    genetic algorithm; interleaving when the cell is saturated; jobs that make way for urgent ones and those
    with a deadline; moves that lower the sum of completion times; core counts adapted to running training
    jobs, and throttling of jobs that slow one down."""
    without = settings.without
    reclaims = "reclaim" not in without
    together = (Lending if reclaims else Together)("penstock", settings.network_weight)
    fair, shape = FairResponse(), ShortestStep()
    stages = DeadlineOrder("penstock", settings.genie, together, fair, shape)
    timed = "deadlines" not in without
    place, order, shaped = (stages, stages, stages) if timed else (together, fair, shape)
    return Profile(
        "penstock",
        place,
        order=order,
        backfill=None if "backfill" in without else Reservation(together, lambda job: not job.spec.timed),
        shape=shaped,
        prelaunch="prelaunch" not in without,
        batch=None
        if "bursts" in without
        else Burst(together, order, settings.network_weight, exact=settings.batch_exact),
        regroup=None if "groups" in without else FairInterleave(),
        migrate=None if "moves" in without else LoadBalance(settings.convergence),
        make_way=MakeWay("penstock", stages.genie, stages.may_take)
        if timed and "make_way" not in without
        else None,
        guard=_guard_without(without),
        reclaim=ArrayReclaim(settings.coda, patient=False, loses_ms=LOSES_MS) if reclaims else None,
    )


def _guard_without(stages: Collection[Stage]) -> Guard | None:
    """The default contention-guard without these stages."""
    search, eliminate = "cores" not in stages, "eliminator" not in stages
    if not search and not eliminate:
        return None
    return guard_of(
        Contention(search="doubling" if search else "none", users_cores="at_least", eliminate=eliminate)
    )


def liquid(name: str, pair_cost: PairCost) -> Make:
    """Best fit, first come, first served; bursts by the grouping genetic algorithm, in their own order."""

    def make(settings: PlacerSettings) -> Profile:
        place = Liquid(settings.network_weight, pair_cost, name=name)
        batch = Burst(
            place, CriticalThenShortest(), settings.network_weight, pair_cost, exact=settings.batch_exact
        )
        return Profile(name, place, prelaunch=True, batch=batch)

    return make


def grouped(name: str, regroup: Callable[[PlacerSettings], Regroup], key: Key) -> Make:
    """A regroup stage plans which jobs run and which share GPUs; until a plan arrives jobs are tried in order
    of the key, first fit, and no job is stopped."""
    return lambda settings: Profile(name, FirstFit(name), order=KeyOrder(key), regroup=regroup(settings))


def genie(settings: PlacerSettings) -> Profile:
    """Deadlines and shapes: least slack first, on the ⟨nodes, GPUs⟩ with the best ratio that is in time."""
    both = Genie("genie", settings.genie, Together("genie", settings.network_weight))
    way = MakeWay("genie", both) if settings.genie.make_way else None
    return Profile("genie", both, order=both, shape=both, make_way=way)


def specon(settings: PlacerSettings) -> Profile:
    """Even spread, first come, first served; converged jobs move. Source: SpeCon §VI-A2 (the same initial
    placement for both schedulers)."""
    return Profile("specon", Even("specon"), migrate=SpeCon(settings.convergence))


def coda(settings: PlacerSettings) -> Profile:
    """Resource arrays with borrowing, dominant resource fairness inside each
    (`penstock.scheduling.place.arrays`); core counts of running training jobs are searched by CODA's hill
    climbing, also where users specified them, and jobs that slow them down are throttled. Source: CODA §V."""
    order = ArrayOrder()
    place = ArrayPlace("coda", order)
    return Profile("coda", place, order=order, reclaim=ArrayReclaim(settings.coda), guard=guard_of(CODA))


PROFILES: Mapping[str, Make] = MappingProxyType(
    {
        "penstock": penstock,
        "liquid": liquid("liquid", PairCost.SHARING),
        "liquid-levels": liquid("liquid-levels", PairCost.LEVELS),
        "fifo": placed_by(lambda settings: FirstFit("fifo")),
        "fifo-strict": placed_by(lambda settings: FirstFit("fifo-strict")),
        "random": placed_by(lambda settings: RandomFit()),
        "even": placed_by(lambda settings: Even("even")),
        "k8s-default": placed_by(
            lambda settings: LeastAndBalanced("k8s-default", count_gpus=True, max_scored=MAX_SCORED)
        ),
        "kubeflow": own_order(Kubeflow),
        "sjf": ordered_by("sjf", shortest_remaining_time, preemptive=False),
        "srtf": ordered_by("srtf", shortest_remaining_time, preemptive=True),
        "srsf": ordered_by("srsf", shortest_remaining_service, preemptive=True),
        "tiresias": least_attained("tiresias", FirstFit),
        "tiresias-fifo": least_attained("tiresias-fifo", MostFree, strict_fifo=True),
        "muri-s": grouped(
            "muri-s", lambda settings: muri_s(settings.grouping, group_plan), shortest_remaining_service
        ),
        "muri-l": grouped(
            "muri-l", lambda settings: muri_l(settings.grouping, group_plan), least_attained_service
        ),
        "interleave": grouped(
            "interleave",
            lambda settings: Interleave(group_plan),
            shortest_remaining_service,
        ),
        "genie": genie,
        "specon": specon,
        "coda": coda,
        "balance": lambda settings: Profile(
            "balance", Even("balance"), migrate=LoadBalance(settings.convergence)
        ),
        "hived": placed_by(lambda settings: BuddyCells()),
        "drf": own_order(DominantResourceFairness),
        "best-fit": placed_by(lambda settings: ScoredFit("best-fit", BestFit())),
        "dot-product": placed_by(lambda settings: ScoredFit("dot-product", DotProduct())),
        "clustering": placed_by(lambda settings: ScoredFit("clustering", Clustering())),
        "packing": placed_by(lambda settings: ScoredFit("packing", Packing())),
        "fgd": placed_by(lambda settings: ScoredFit("fgd", FragmentationGradient(settings.typical_tasks))),
    }
)

KNOWN_PROFILES = 4  # cached by `known_profile`
DEFAULT = "penstock"
"""Profile of a cell whose operator names none. `PlacerSettings.profile` has the default with which ledgers
were written."""
READ_DURATIONS = frozenset({"penstock", "genie", "sjf", "srtf", "srsf", "muri-s", "interleave"})
"""Profiles whose order depends on predicted run times; the decisions of the others do not."""
WANT_TYPICAL_TASKS = frozenset({"fgd"})
"""Profiles that read the setting `typical_tasks`: a simulation fills it from its trace."""
ALL_ARE_TRIED = MappingProxyType({"backfill_window": MAX_BACKFILL_WINDOW, "max_overtakes": MAX_OVERTAKES})
FIXED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "fifo-strict": MappingProxyType({"backfill_window": 1}),
        "kubeflow": ALL_ARE_TRIED,
        "drf": ALL_ARE_TRIED,
        "coda": ALL_ARE_TRIED,
        "muri-s": ALL_ARE_TRIED,
        "muri-l": ALL_ARE_TRIED,
        "interleave": ALL_ARE_TRIED,
        "penstock": MappingProxyType({"max_overtakes": MAX_OVERTAKES}),
        "genie": MappingProxyType({"max_overtakes": MAX_OVERTAKES}),
    }
)
"""Profile → settings that it fixes, whatever was given."""


def in_force(settings: PlacerSettings) -> PlacerSettings:
    """The settings with those that the profile fixes: used by the placer and by explanations."""
    fixed = FIXED.get(settings.profile)
    return settings if fixed is None else msgspec.structs.replace(settings, **fixed)


class UnknownProfile(LookupError):
    """No profile has this name; the message lists those that exist."""


class UnusedSetting(ValueError):
    """A setting asks for what the profile does not have; the message names the field and the remedy."""


def check_settings(settings: PlacerSettings) -> None:
    """For settings that an operator gives; those in a ledger are taken as they are. Raises `UnknownProfile`,
    `UnusedSetting`."""
    profile = profile_for(settings)
    if settings.genie.make_way and profile.make_way is None:
        left_out = ", or in none with these stages left out (`without`)" if settings.without else ""
        raise UnusedSetting(
            f"genie.make_way is true, but in profile {settings.profile} no job makes way{left_out}; choose "
            "penstock or genie, or leave it out"
        )


def profile_for(settings: PlacerSettings) -> Profile:
    """The stages of the settings' profile. Raises `UnknownProfile`."""
    make = PROFILES.get(settings.profile)
    if make is None:
        raise UnknownProfile(f"{settings.profile!r} is no profile; there are {', '.join(sorted(PROFILES))}")
    profile = make(settings)
    if settings.contention is not None:
        profile = profile._replace(guard=guard_of(settings.contention))
    return (
        profile._replace(place=ByMeasuredPairs(profile.place))
        if settings.share_gpus == "learned"
        else profile
    )


@lru_cache(KNOWN_PROFILES)
def known_profile(settings: PlacerSettings) -> Profile | None:
    """As `profile_for`, for services that propose: with its stages' caches, and None for a profile of a newer
    placer, which is unknown here."""
    try:
        return profile_for(settings)
    except UnknownProfile:
        return None
