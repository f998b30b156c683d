"""Profiles: the names under which policies are chosen. One table; nothing ever looks into a name.

A profile is a policy and what it fixes of the settings, because it would not be itself otherwise.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from penstock.model.ledger_events import MAX_BACKFILL_WINDOW, MAX_OVERTAKES, PlacerSettings
from penstock.policies.base import Policy
from penstock.policies.baselines import Even, FirstFit, MostFree, RandomFit
from penstock.policies.drf import DominantResourceFairness
from penstock.policies.fgd import FragmentationGradient
from penstock.policies.hived import BuddyCells
from penstock.policies.kubernetes import MAX_SCORED, Kubeflow, LeastAndBalanced
from penstock.policies.liquid import Liquid, PairCost
from penstock.policies.ordered import Ordered, shortest_remaining_service, shortest_remaining_time
from penstock.policies.packing import BestFit, Clustering, DotProduct, Packing
from penstock.policies.scored import ScoredFit
from penstock.policies.tiresias import Tiresias

PROFILES: Mapping[str, Callable[[PlacerSettings], Policy]] = MappingProxyType(
    {
        "liquid": lambda settings: Liquid(settings.network_weight),
        "liquid-levels": lambda settings: Liquid(
            settings.network_weight, PairCost.LEVELS, name="liquid-levels"
        ),
        "fifo": lambda settings: FirstFit("fifo"),
        "fifo-strict": lambda settings: FirstFit("fifo-strict"),
        "random": lambda settings: RandomFit(),
        "even": lambda settings: Even("even"),
        "k8s-default": lambda settings: LeastAndBalanced(
            "k8s-default", count_gpus=True, max_scored=MAX_SCORED
        ),
        "kubeflow": lambda settings: Kubeflow(),
        "sjf": lambda settings: Ordered("sjf", shortest_remaining_time, preemptive=False),
        "srtf": lambda settings: Ordered("srtf", shortest_remaining_time, preemptive=True),
        "srsf": lambda settings: Ordered("srsf", shortest_remaining_service, preemptive=True),
        "tiresias": lambda settings: Tiresias("tiresias", settings.queue_limits_gpu_s, FirstFit("tiresias")),
        "tiresias-fifo": lambda settings: Tiresias(
            "tiresias-fifo", settings.queue_limits_gpu_s, MostFree("tiresias-fifo"), strict_fifo=True
        ),
        "hived": lambda settings: BuddyCells(),
        "drf": lambda settings: DominantResourceFairness(),
        "best-fit": lambda settings: ScoredFit("best-fit", BestFit()),
        "dot-product": lambda settings: ScoredFit("dot-product", DotProduct()),
        "clustering": lambda settings: ScoredFit("clustering", Clustering()),
        "packing": lambda settings: ScoredFit("packing", Packing()),
        "fgd": lambda settings: ScoredFit("fgd", FragmentationGradient(settings.typical_tasks)),
    }
)

READ_DURATIONS = frozenset({"sjf", "srtf", "srsf"})
"""Profiles whose order rests on how long a job will run; the others choose the same whether that is known or not."""
WANT_TYPICAL_TASKS = frozenset({"fgd"})
"""Profiles that read the setting `typical_tasks`: a simulation fills it from its trace."""
ALL_ARE_TRIED = MappingProxyType({"backfill_window": MAX_BACKFILL_WINDOW, "max_overtakes": MAX_OVERTAKES})
FIXED: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "fifo-strict": MappingProxyType({"backfill_window": 1}),
        "kubeflow": ALL_ARE_TRIED,
        "drf": ALL_ARE_TRIED,
    }
)
"""Profile → settings that it fixes, whatever was given."""


def in_force(settings: PlacerSettings) -> PlacerSettings:
    """The settings with what the profile fixes: what the placer goes by, and explanations with it."""
    fixed = FIXED.get(settings.profile)
    return settings if fixed is None else msgspec.structs.replace(settings, **fixed)


class UnknownProfile(LookupError):
    """No policy has this name; the message lists those that exist."""


def policy_for(settings: PlacerSettings) -> Policy:
    """The policy of the settings' profile. Raises `UnknownProfile`."""
    make = PROFILES.get(settings.profile)
    if make is None:
        raise UnknownProfile(f"{settings.profile!r} is no profile; there are {', '.join(sorted(PROFILES))}")
    return make(settings)
