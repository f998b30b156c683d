"""Cores chosen by CODA's start and at most four probes, on the speeds that Synergy measured at 1 to 24 cores.

`-s` shows every figure; those of a first job are in table `coda-probes` of `make papers`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from penstock.scheduling.acting.core_search import search, walk
from penstock_services.estimator.core.resources.cores import PastJob
from tests.papers.prediction.prediction_tables import CATEGORY, DATA, settled

FILE = DATA / "synergy/cpu_mem_sensitivity.csv"
Settled = Mapping[str, tuple[int, float, int]]

pytestmark = pytest.mark.skipif(
    not FILE.is_file(),
    reason=f"Synergy's table is not {FILE}; set PENSTOCK_DATA to the folder that holds synergy/",
)


def show(name: str, found: Settled) -> None:
    print(
        f"\n{name}: mean {np.mean([share for _, share, _ in found.values()]):.1%} of the best speed", end=", "
    )
    print(f"{sum(cores for cores, _, _ in found.values())} cores;", end=" ")
    print(", ".join(f"{model} {cores} ({share:.0%})" for model, (cores, share, _) in found.items()), end="")


def others_of(found: Settled, model: str) -> Sequence[PastJob]:
    """The owner's history: what every other model settled on."""
    return [PastJob(CATEGORY[other], cores) for other, (cores, _, _) in found.items() if other != model]


def test_our_search_reaches_the_best_speed_even_for_a_first_job() -> None:
    """An owner without history: N_start by category and four probes."""
    first = settled(search, lambda _: ())
    show("first job, search", first)
    assert min(share for _, share, _ in first.values()) >= 0.95


def test_our_search_reaches_it_with_the_owners_history() -> None:
    """The owner ran all the other models before: the start is the most of them in the category."""
    first = settled(search, lambda _: ())
    later = settled(search, lambda model: others_of(first, model))
    show("with history of other models, search", later)
    assert min(share for _, share, _ in later.values()) >= 0.95


def test_codas_walk_needs_history() -> None:
    """Steps of one core from 3 end at 6: the networks that need 12 get there only on their owner's later
    jobs."""
    first = settled(walk, lambda _: ())
    show("first job, CODA's walk", first)
    assert first["alexnet"][1] < 0.7
    again = first
    for turn in range(2, 5):
        past = {model: [PastJob(CATEGORY[model], cores)] for model, (cores, *_) in again.items()}
        again = settled(walk, past.__getitem__)
        show(f"job {turn} of the same model, CODA's walk", again)
    assert min(share for _, share, _ in again.values()) >= 0.95
