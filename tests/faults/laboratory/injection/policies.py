"""Policies that raise now and then: whatever the placer asks of its policy may fail instead of being
answered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.scheduling.stages.protocols import Profile
from penstock_services.placer.core import decide
from tests.faults.laboratory.patching import posing
from tests.faults.laboratory.world import World

QUESTIONS = ("place", "order", "select", "unit", "beside")


class PolicyBug(Exception):
    """What such a policy raises."""


@contextmanager
def raising_policies(world: World) -> Iterator[None]:
    """Every stage of the profiles that the placer's core makes raises at the rate of the run."""
    make = profiles.profile_for

    def profile_for(settings: PlacerSettings) -> Profile:
        profile = make(settings)
        for stage in {id(stage): stage for stage in profile[1:]}.values():
            for name in QUESTIONS:
                answer = getattr(stage, name, None)
                if answer is not None:
                    setattr(stage, name, _raising(world, answer))
        return profile

    with posing(decide, "profile_for", profile_for):
        yield


def _raising(world: World, answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*given: Any) -> Any:
        if world.rates.policy and world.happens(world.rates.policy):
            raise PolicyBug(answer.__name__)
        return answer(*given)

    return asked
