"""Policies that raise now and then: whatever the placer asks of its policy may fail instead of being answered."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.model.ledger_events import PlacerSettings
from penstock.policies import profiles
from penstock.policies.base import Policy
from penstock_services.placer.core import decide
from tests.faults.laboratory.patching import posing
from tests.faults.laboratory.world import World

QUESTIONS = ("place", "order", "plan")


class PolicyBug(Exception):
    """What such a policy raises."""


@contextmanager
def raising_policies(world: World) -> Iterator[None]:
    """Every policy that the placer's core makes raises at the rate of the run."""
    make = profiles.policy_for

    def policy_for(settings: PlacerSettings) -> Policy:
        policy = make(settings)
        for name in QUESTIONS:
            answer = getattr(policy, name, None)
            if answer is not None:
                setattr(policy, name, _raising(world, answer))
        return policy

    with posing(decide, "policy_for", policy_for):
        yield


def _raising(world: World, answer: Callable[..., Any]) -> Callable[..., Any]:
    def asked(*given: Any) -> Any:
        if world.rates.policy and world.happens(world.rates.policy):
            raise PolicyBug(answer.__name__)
        return answer(*given)

    return asked
