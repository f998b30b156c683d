"""Profiles: the names under which policies are chosen. One table; nothing ever looks into a name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from penstock.events.facts import PlacerSettings
from penstock.policies.base import Policy
from penstock.policies.baselines import Even, FirstFit, KubernetesDefault, MostFree, RandomFit
from penstock.policies.liquid import Liquid, PairCost
from penstock.policies.ordered import Ordered, shortest_remaining_service, shortest_remaining_time
from penstock.policies.tiresias import Tiresias

PROFILES: Mapping[str, Callable[[PlacerSettings], Policy]] = MappingProxyType(
    {
        "liquid": lambda settings: Liquid(settings.network_weight),
        "liquid-levels": lambda settings: Liquid(
            settings.network_weight, PairCost.LEVELS, name="liquid-levels"
        ),
        "fifo": lambda settings: FirstFit(),
        "random": lambda settings: RandomFit(),
        "even": lambda settings: Even(),
        "k8s-default": lambda settings: KubernetesDefault(),
        "sjf": lambda settings: Ordered("sjf", shortest_remaining_time, preemptive=False),
        "srtf": lambda settings: Ordered("srtf", shortest_remaining_time, preemptive=True),
        "srsf": lambda settings: Ordered("srsf", shortest_remaining_service, preemptive=True),
        "tiresias": lambda settings: Tiresias("tiresias", settings.queue_limits_gpu_s, FirstFit("tiresias")),
        "tiresias-fifo": lambda settings: Tiresias(
            "tiresias-fifo", settings.queue_limits_gpu_s, MostFree("tiresias-fifo"), strict_fifo=True
        ),
    }
)


class UnknownProfile(LookupError):
    """No policy has this name; the message lists those that exist."""


def policy_for(settings: PlacerSettings) -> Policy:
    """The policy of the settings' profile. Raises `UnknownProfile`."""
    make = PROFILES.get(settings.profile)
    if make is None:
        raise UnknownProfile(f"{settings.profile!r} is no profile; there are {', '.join(sorted(PROFILES))}")
    return make(settings)
