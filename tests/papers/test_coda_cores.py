"""Cores chosen by CODA's start and at most four probes, on the speeds that Synergy measured at 1 to 24 cores.

Between measured counts the speed is linear. `-s` shows every figure.
"""

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.model.types import Category
from penstock.policies.core_search import Next, Seen, search, walk
from penstock_services.estimator.core.resources.cores import PastJob, n_start

FILE = (
    Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data"))
    / "synergy/cpu_mem_sensitivity.csv"
)
CATEGORY: dict[str, Category] = {
    "alexnet": "cv",
    "mobilenet": "cv",
    "res18": "cv",
    "res50": "cv",
    "shufflenet": "cv",
    "vae": "cv",
    "bert": "nlp",
    "gnmt": "nlp",
    "lstm": "nlp",
    "transformer": "nlp",
    "deepspeech": "speech",
    "m5": "speech",
}
MOST = 24  # cores of the measured machine
Step = Callable[[int, Sequence[Seen], int], Next]

pytestmark = pytest.mark.skipif(
    not FILE.is_file(),
    reason=f"Synergy's table is not {FILE}; set PENSTOCK_DATA to the folder that holds synergy/",
)


def speeds() -> dict[str, dict[int, float]]:
    """Model → cores → speed of one GPU, with all memory."""
    found: dict[str, dict[int, float]] = {}
    with FILE.open() as file:
        for row in csv.DictReader(file):
            key = row["cpu_gpu_ratio_dir"], row["num_gpu"], row["mem_gb"]
            if key == ("models", "1", "250") and row["model"] in CATEGORY:
                found.setdefault(row["model"], {})[int(row["cpus"])] = float(row["relative_tput"])
    assert set(found) == set(CATEGORY)
    return found


def settle(step: Step, start: int, table: dict[int, float]) -> tuple[int, float]:
    """(cores, speed there / best speed in the table), with at most four probes after the start."""

    def speed(cores: int) -> float:
        return float(np.interp(cores, list(table), list(table.values())))

    seen: list[Seen] = []
    while not (found := step(start, seen, MOST)).settled:
        seen.append(Seen(found.cores, speed(found.cores)))
        assert len(seen) <= 5
    return found.cores, speed(found.cores) / max(table.values())


def run(step: Step, past: Callable[[str], list[PastJob]]) -> dict[str, tuple[int, float]]:
    found = {}
    for model, table in speeds().items():
        start = n_start(CATEGORY[model], (), past(model), MOST)
        assert start is not None
        found[model] = settle(step, start.cores, table)
    return found


def show(name: str, found: dict[str, tuple[int, float]]) -> None:
    print(f"\n{name}: mean {np.mean([share for _, share in found.values()]):.1%} of the best speed", end=", ")
    print(f"{sum(cores for cores, _ in found.values())} cores;", end=" ")
    print(", ".join(f"{model} {cores} ({share:.0%})" for model, (cores, share) in found.items()), end="")


def others_of(found: dict[str, tuple[int, float]], model: str) -> list[PastJob]:
    """The owner's history: what every other model settled on."""
    return [PastJob(CATEGORY[other], cores) for other, (cores, _) in found.items() if other != model]


def test_our_search_reaches_the_best_speed_even_for_a_first_job() -> None:
    """An owner without history: N_start by category and four probes."""
    first = run(search, lambda model: [])
    show("first job, search", first)
    assert min(share for _, share in first.values()) >= 0.95


def test_our_search_reaches_it_with_the_owners_history() -> None:
    """The owner ran all the other models before: the start is the most of them in the category."""
    first = run(search, lambda model: [])
    later = run(search, lambda model: others_of(first, model))
    show("with history of other models, search", later)
    assert min(share for _, share in later.values()) >= 0.95


def test_codas_walk_needs_history() -> None:
    """Steps of one core from 3 end at 6: the networks that need 12 get there only on their owner's later jobs."""
    first = run(walk, lambda model: [])
    show("first job, CODA's walk", first)
    assert first["alexnet"][1] < 0.7
    again = first
    for turn in range(2, 5):
        before = again
        again = run(walk, lambda model: [PastJob(CATEGORY[model], before[model][0])])  # noqa: B023 used at once
        show(f"job {turn} of the same model, CODA's walk", again)
    assert min(share for _, share in again.values()) >= 0.95
