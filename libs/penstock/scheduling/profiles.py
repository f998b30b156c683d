"""Scheduling profiles by name: the product's own, `penstock`, and those that installed packages define.

A profile is composed of stages (`penstock.scheduling.stages.protocols.Profile`). What depends on its name is
in its definition (`penstock.scheduling.definition`), so no code inspects a name.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.entry_points import Group
from penstock.model.nouns.settings import (
    MAX_OVERTAKES,
    OWN_PROFILE,
    Contention,
    PlacerSettings,
    Stage,
    own_object,
    own_settings_apart,
)
from penstock.model.nouns.types import Value
from penstock.model.schema.errors import Invalid
from penstock.model.schema.validation import checked
from penstock.scheduling.acting.guard import Guard, guard_of
from penstock.scheduling.acting.load_balance import LoadBalance
from penstock.scheduling.bursts.burst import Burst
from penstock.scheduling.definition import Definition, NoSettings, text_of
from penstock.scheduling.groups.fair_interleave import FairInterleave
from penstock.scheduling.make_room.array_reclaim import ArrayReclaim
from penstock.scheduling.make_room.backfill import Reservation
from penstock.scheduling.make_room.make_way import MakeWay
from penstock.scheduling.order.deadline_order import DeadlineOrder
from penstock.scheduling.order.fair import FairResponse
from penstock.scheduling.place.lending import Lending
from penstock.scheduling.place.measured_pairs import ByMeasuredPairs
from penstock.scheduling.place.moldable import ShortestStep
from penstock.scheduling.place.together import Together
from penstock.scheduling.stages.protocols import Profile
from penstock.scheduling.stop_cost import LOSES_MS
from penstock.text.installing import installing

INSTALLED: Group[Definition] = Group("penstock.profiles")
"""The profiles that installed packages define."""
KNOWN_PROFILES = 4  # cached by `known_profile`


def _penstock(settings: PlacerSettings, own: NoSettings) -> Profile:
    """All stages together:

    - order: least slack to the deadline, then tenants below their share, then the highest response ratio
    - place: compact gangs, on cores that are lent to jobs without GPUs where they are free
    - shape: the number of workers with the shortest step
    - backfill behind a reservation
    - pre-launch on GPUs of jobs that are about to end
    - bursts by the grouping genetic algorithm
    - groups that take turns on GPUs when the cell is saturated
    - make way: running jobs give their place to urgent jobs and jobs with a deadline
    - moves that lower the sum of completion times
    - guard: core counts of running trainings, and limits for jobs that slow a training down
    """
    without = settings.without
    reclaims = "reclaim" not in without
    together = (Lending if reclaims else Together)(OWN_PROFILE, settings.network_weight)
    fair, shape = FairResponse(), ShortestStep()
    stages = DeadlineOrder(OWN_PROFILE, together, fair, shape)
    timed = "deadlines" not in without
    place, order, shaped = (stages, stages, stages) if timed else (together, fair, shape)
    return Profile(
        OWN_PROFILE,
        place,
        order=order,
        backfill=None if "backfill" in without else Reservation(together, lambda job: not job.spec.timed),
        shape=shaped,
        prelaunch="prelaunch" not in without,
        batch=None if "bursts" in without else Burst(together, order, settings.network_weight),
        regroup=None if "groups" in without else FairInterleave(),
        migrate=None if "moves" in without else LoadBalance(settings.convergence),
        make_way=MakeWay(OWN_PROFILE, stages.genie, stages.may_take)
        if timed and "make_way" not in without
        else None,
        guard=_guard_without(without),
        reclaim=ArrayReclaim(settings.coda, loses_ms=LOSES_MS) if reclaims else None,
    )


def _guard_without(stages: Collection[Stage]) -> Guard | None:
    """The default contention-guard without these stages."""
    search, eliminate = "cores" not in stages, "eliminator" not in stages
    if not search and not eliminate:
        return None
    return guard_of(
        Contention(search="doubling" if search else "none", users_cores="at_least", eliminate=eliminate)
    )


PENSTOCK = Definition(
    _penstock, fixed=MappingProxyType({"max_overtakes": MAX_OVERTAKES}), reads_run_times=True
)


class UnknownProfile(LookupError):
    """No profile has this name; the message lists those that exist."""


class UnusedSetting(ValueError):
    """A setting that the profile does not have; the message names the field and the remedy."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def names() -> list[str]:
    """All profiles, in the order of the alphabet."""
    return sorted({OWN_PROFILE, *INSTALLED.names()})


def definition_of(name: str) -> Definition:
    """Raises `UnknownProfile`."""
    if name == OWN_PROFILE:
        return PENSTOCK
    try:
        found = INSTALLED.get(name)
    except ImportError as error:
        raise UnknownProfile(f"profile {name} cannot be loaded: {error}; {installing('papers')}") from error
    if found is None:
        there = names()
        more = f"; for more {installing('papers')}" if there == [OWN_PROFILE] else ""
        raise UnknownProfile(f"{name!r} is not a profile; there are {', '.join(there)}{more}")
    return found


def reads_run_times(name: str) -> bool:
    """Whether the decisions of this profile depend on predicted run times; False for an unknown one."""
    try:
        return definition_of(name).reads_run_times
    except UnknownProfile:
        return False


def in_force(settings: PlacerSettings) -> PlacerSettings:
    """The settings with those that the profile fixes: used by the placer and by explanations. Of an unknown
    profile: as they are."""
    try:
        fixed = definition_of(settings.profile).fixed
    except UnknownProfile:
        return settings
    return msgspec.structs.replace(settings, **fixed) if fixed else settings


def own_names(name: str) -> tuple[str, ...]:
    """Names of a profile's own settings. Raises `UnknownProfile`."""
    return definition_of(name).form.__struct_fields__


def settings_of(given: Mapping[str, Any]) -> PlacerSettings:
    """Settings that an operator gives by name: fields of `PlacerSettings`, and beside them the profile's own.

    Raises `UnknownProfile`, `UnusedSetting`, and pydantic's ValidationError with every wrong field.
    """
    name = str(given.get("profile", OWN_PROFILE))
    form = definition_of(name).form
    try:
        found = own_settings_apart(given)
        own = own_object(found.pop("profile_settings", ""))
    except ValueError as error:
        raise UnusedSetting("profile_settings", f"profile_settings: {error}") from error
    beside = [field for field in found if field not in PlacerSettings.__struct_fields__]
    own |= {field: found.pop(field) for field in beside}
    for field in own:
        _refuse_unused(name, form, field, field if field in given else "profile_settings")
    return checked(PlacerSettings, {**found, "profile_settings": text_of(checked(form, own))})


def _refuse_unused(name: str, form: type[Value], field: str, where: str) -> None:
    """Raises `UnusedSetting` for a name that is no own setting of the profile. `where`: the setting that has
    it."""
    if field not in form.__struct_fields__:
        known = ", ".join(form.__struct_fields__)
        has = f"its own are {known}" if known else "it has none of its own"
        raise UnusedSetting(where, f"profile {name} has no setting {field}: {has}; leave it out")


def profile_for(settings: PlacerSettings) -> Profile:
    """The stages of the settings' profile. Raises `UnknownProfile`, also for own settings that this version
    cannot read."""
    definition = definition_of(settings.profile)
    try:
        own = definition.own(settings)
    except Invalid as error:
        raise UnknownProfile(f"profile_settings of {settings.profile}: {error}") from error
    profile = definition.make(settings, own)
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
