"""Profiles of the papers and of their baselines: one definition per entry point of the group
`penstock.profiles`.

Every name in `pyproject.toml` under `[project.entry-points."penstock.profiles"]` is a constant here.
"""

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

from penstock.model.nouns.settings import MAX_BACKFILL_WINDOW, MAX_OVERTAKES, Contention, PlacerSettings
from penstock.scheduling.acting.guard import guard_of
from penstock.scheduling.acting.load_balance import LoadBalance
from penstock.scheduling.bursts.burst import Burst
from penstock.scheduling.bursts.gga import GeneticSearch
from penstock.scheduling.definition import Definition, Worker
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.make_room.make_way import MakeWay
from penstock.scheduling.place.liquid import Liquid, Network
from penstock.scheduling.place.together import Together
from penstock.scheduling.remaining_time import Key
from penstock.scheduling.stages.protocols import Policy, Profile
from penstock.scheduling.stages.regroup import Regroup
from penstock_papers.baselines.baselines import Even, FirstFit, MostFree, RandomFit
from penstock_papers.baselines.burst_order import CriticalThenShortest
from penstock_papers.baselines.drf import DominantResourceFairness
from penstock_papers.baselines.fgd import FragmentationGradient, typical_tasks
from penstock_papers.baselines.hived import BuddyCells
from penstock_papers.baselines.key_order import KeyOrder
from penstock_papers.baselines.kubernetes import MAX_SCORED, Kubeflow, LeastAndBalanced
from penstock_papers.baselines.packing import BestFit, Clustering, DotProduct, Packing
from penstock_papers.baselines.preempting.ordered import (
    Ordered,
    shortest_remaining_service,
    shortest_remaining_time,
)
from penstock_papers.baselines.preempting.tiresias import Tiresias
from penstock_papers.baselines.scored import ScoredFit, Scorer
from penstock_papers.coda.array_order import ArrayOrder
from penstock_papers.coda.array_place import ArrayPlace
from penstock_papers.coda.array_reclaim import PatientReclaim
from penstock_papers.genie import CHOICES
from penstock_papers.liquid import ExactSearch, Levels
from penstock_papers.muri.muri import least_attained_service, muri_l, muri_s
from penstock_papers.settings import (
    CodaSettings,
    FgdSettings,
    GenieSettings,
    LiquidSettings,
    MuriSettings,
    TiresiasSettings,
)
from penstock_papers.specon import SpeCon

CODA_CONTENTION = Contention(search="walk", users_cores="override", throttle="half")
"""The source's values; the cell's setting `contention` overrides them."""
ALL_ARE_TRIED = MappingProxyType({"backfill_window": MAX_BACKFILL_WINDOW, "max_overtakes": MAX_OVERTAKES})


def _placed_by(policy: Callable[[], Policy]) -> Definition:
    """First come, first served with backfill; only the place stage differs."""

    def make(settings: PlacerSettings, own: Any) -> Profile:
        found = policy()
        return Profile(found.name, found)

    return Definition(make)


def _scored_by(name: str, scorer: Callable[[], Scorer]) -> Definition:
    return _placed_by(lambda: ScoredFit(name, scorer()))


def _ordered_by(name: str, key: Key, *, preemptive: bool) -> Definition:
    """Preemption by key, with first fit."""
    return Definition(
        lambda settings, own: Profile(name, FirstFit(name), preempt=Ordered(key, preemptive=preemptive)),
        reads_run_times=True,
    )


def _own_order(policy: Callable[[], Any]) -> Definition:
    """One object is both place and order stage."""

    def make(settings: PlacerSettings, own: Any) -> Profile:
        both = policy()
        return Profile(both.name, both, order=both)

    return Definition(make, ALL_ARE_TRIED)


def _least_attained(name: str, where: Callable[[str], Policy], *, strict_fifo: bool = False) -> Definition:
    """Tiresias's queues; `where`: the place stage."""
    return Definition(
        lambda settings, own: Profile(
            name,
            where(name),
            preempt=Tiresias(own.queue_limits_gpu_s, strict_fifo=strict_fifo),
            beside_stops=not strict_fifo,
        ),
        form=TiresiasSettings,
    )


def _liquid(name: str, network: type[Network]) -> Definition:
    """Best fit, first come, first served; bursts by the grouping genetic algorithm, in their own order."""

    def make(settings: PlacerSettings, own: Any) -> Profile:
        place = Liquid(settings.network_weight, network, name=name)
        search = ExactSearch if own.batch_exact else GeneticSearch
        batch = Burst(place, CriticalThenShortest(), settings.network_weight, network, search=search)
        return Profile(name, place, prelaunch=True, batch=batch)

    return Definition(make, form=LiquidSettings)


def _grouped(name: str, regroup: Callable[[Any], Regroup], key: Key, *, reads: bool) -> Definition:
    """A regroup stage plans which jobs run and which share GPUs; until a plan arrives jobs are tried in order
    of the key, first fit, and no job is stopped."""
    return Definition(
        lambda settings, own: Profile(name, FirstFit(name), order=KeyOrder(key), regroup=regroup(own)),
        ALL_ARE_TRIED,
        reads_run_times=reads,
    )


def _genie(settings: PlacerSettings, own: GenieSettings) -> Profile:
    """Deadlines and shapes: least slack first, on the ⟨nodes, GPUs⟩ with the best ratio that is in time."""
    wanted = own.genie
    both = CHOICES[wanted.choose]("genie", Together("genie", settings.network_weight), wanted.theta)
    way = MakeWay("genie", both) if wanted.make_way else None
    return Profile("genie", both, order=both, shape=both, make_way=way)


def _specon(settings: PlacerSettings, own: Any) -> Profile:
    """Even spread, first come, first served; converged jobs move. Source: SpeCon §VI-A2 (the same initial
    placement for both schedulers)."""
    return Profile("specon", Even("specon"), migrate=SpeCon(settings.convergence))


def _balance(settings: PlacerSettings, own: Any) -> Profile:
    """As `specon`; the job whose move lowers the sum of completion times most moves."""
    return Profile("balance", Even("balance"), migrate=LoadBalance(settings.convergence))


def _coda(settings: PlacerSettings, own: CodaSettings) -> Profile:
    """Resource arrays with borrowing, dominant resource fairness inside each
    (`penstock.scheduling.place.arrays`); core counts of running training jobs are searched by CODA's hill
    climbing, also where users specified them, and jobs that slow them down are throttled. Source: CODA §V."""
    order = ArrayOrder()
    place = ArrayPlace("coda", order)
    guard = guard_of(CODA_CONTENTION)
    return Profile(
        "coda", place, order=order, reclaim=PatientReclaim(settings.coda, own.patience_ms), guard=guard
    )


def _fgd(settings: PlacerSettings, own: FgdSettings) -> Profile:
    """First come, first served with backfill, by the fragmentation gradient."""
    return Profile("fgd", ScoredFit("fgd", FragmentationGradient(own.typical_tasks)))


def _with_typical_tasks(own: FgdSettings, workers: Iterable[Worker]) -> FgdSettings:
    """The kinds of workers that make up 95 % of all in the trace, unless typical tasks are given."""
    return own if own.typical_tasks else FgdSettings(typical_tasks=typical_tasks(workers))


LIQUID = _liquid("liquid", Network)
LIQUID_LEVELS = _liquid("liquid-levels", Levels)
FIFO = _placed_by(lambda: FirstFit("fifo"))
FIFO_STRICT = _placed_by(lambda: FirstFit("fifo-strict"))._replace(
    fixed=MappingProxyType({"backfill_window": 1})
)
RANDOM = _placed_by(RandomFit)
EVEN = _placed_by(lambda: Even("even"))
K8S_DEFAULT = _placed_by(lambda: LeastAndBalanced("k8s-default", count_gpus=True, max_scored=MAX_SCORED))
KUBEFLOW = _own_order(Kubeflow)
SJF = _ordered_by("sjf", shortest_remaining_time, preemptive=False)
SRTF = _ordered_by("srtf", shortest_remaining_time, preemptive=True)
SRSF = _ordered_by("srsf", shortest_remaining_service, preemptive=True)
TIRESIAS = _least_attained("tiresias", FirstFit)
TIRESIAS_FIFO = _least_attained("tiresias-fifo", MostFree, strict_fifo=True)
MURI_S = _grouped(
    "muri-s",
    lambda own: muri_s(own.grouping, group_plan),
    shortest_remaining_service,
    reads=True,
)._replace(form=MuriSettings)
MURI_L = _grouped(
    "muri-l",
    lambda own: muri_l(own.grouping, group_plan),
    least_attained_service,
    reads=False,
)._replace(form=MuriSettings)
INTERLEAVE = _grouped(
    "interleave", lambda own: Interleave(group_plan), shortest_remaining_service, reads=True
)
GENIE = Definition(
    _genie, MappingProxyType({"max_overtakes": MAX_OVERTAKES}), reads_run_times=True, form=GenieSettings
)
SPECON = Definition(_specon)
BALANCE = Definition(_balance)
CODA = Definition(_coda, ALL_ARE_TRIED, form=CodaSettings)
HIVED = _placed_by(BuddyCells)
DRF = _own_order(DominantResourceFairness)
BEST_FIT = _scored_by("best-fit", BestFit)
DOT_PRODUCT = _scored_by("dot-product", DotProduct)
CLUSTERING = _scored_by("clustering", Clustering)
PACKING = _scored_by("packing", Packing)
FGD = Definition(_fgd, form=FgdSettings, fill=_with_typical_tasks)
