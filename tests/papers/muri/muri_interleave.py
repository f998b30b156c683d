"""Profile `interleave` under the rules of Muri's simulator, on traces and generated mixes: `python -m
tests.papers.muri.muri_interleave`.

Each row: average JCT without groups (SRSF where run times are known, else Tiresias) as a multiple of ours,
and our restarts per job. A trace is simulated once; of each of the 72 mixes one seed is: over seeds the same
is measured through the engine (`mixes` of `tests.papers.muri.muri_tables`).

What is due to what: `--alone`: no stages are known, so no jobs share, and only the order differs; `--few`:
the mixes in which hardly any job waits, run times known, over 20 seeds, with stage times that are right or
wrong, and with starts that cost or cost nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from statistics import fmean, geometric_mean
from typing import NamedTuple

from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.groups.search.group_search import MAX_IN_ORDER
from tests.papers.muri import muri_reference as reference
from tests.papers.muri.muri_mixes import mix, noisy
from tests.papers.muri.muri_planned import Planned, Profiled, measured
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import mean
from tests.papers.tables import PaperTable, Row, main
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "muri"
TRACES = (
    ("trace3", None),
    ("job_type_1", None),
    ("job_type_2", None),
    ("job_type_3", None),
    ("job_type_4", None),
    ("trace1", 300),
    ("trace2", 300),
    ("trace4", 400),
    ("trace1_pr", 300),
    ("trace3_pr", 300),
)
"""Name, and of the long ones so many of the first jobs: without groups their queues grow for the whole
trace."""
ONE_GPU, LOADS, NOISES, JOBS = (0.0, 0.5, 0.9, 1.0), (0.5, 1.0, 1.5), (0.0, 0.5, 1.0), 200
EQUAL = 0.999
FEW, FEW_SEEDS = ((1.0, 46), (1.5, 52)), range(5_000, 5_019)
"""(load, seed of `_of_mixes`) of mixes with 90 % one-GPU jobs, and the further seeds."""
GEOMETRIC = 1.6
_KNOWN = {True: "known", False: "unknown"}


def no_stages(job: reference.Job) -> tuple[float, float, float, float]:
    return 0.0, 0.0, 0.0, 0.0


def ours(known: bool, profiled: Profiled = measured) -> Planned:
    """`known`: whether run times are."""
    stage = Interleave(group_plan)

    def key(job: reference.Job) -> float:
        return stage.key(job.time_left if known else inf, job.attained, job.gpus)

    truth = reference.Muri(known=known)
    return Planned(stage.solve, key, known=known, profiled=profiled, listed=MAX_IN_ORDER, truth=truth)


class Outcome(NamedTuple):
    """Mean JCT without groups over ours, and our restarts per job."""

    ratio: float
    restarts: float
    bound: float = 1.0
    """Mean JCT without groups over that of jobs that never wait, each alone on its GPUs."""


def compared(jobs: Callable[[], list[reference.Job]], known: bool, profiled: Profiled) -> Outcome:
    """A run changes its jobs."""
    alone_s = fmean(job.time_left for job in jobs())
    baseline = reference.simulate(jobs(), reference.srsf() if known else reference.Tiresias())
    found = reference.simulate(jobs(), ours(known, profiled))
    return Outcome(baseline.mean_jct / found.mean_jct, found.restarts, baseline.mean_jct / alone_s)


@simulated(Outcome(1.0, 1.0))
def of_trace(trace: str, first: int | None, known: bool, stages: bool = True) -> Outcome:
    profiled = measured if stages else no_stages
    return compared(lambda: reference.read(DATA, trace, first), known, profiled)


@simulated(Outcome(1.0, 1.0))
def of_mix(
    seed: int, one_gpu: float, load: float, noise: float, known: bool, starts_cost: bool = True
) -> Outcome:
    def jobs() -> list[reference.Job]:
        found = mix(DATA, seed, one_gpu=one_gpu, load=load, jobs=JOBS)
        for job in found:
            job.overhead *= starts_cost
        return found

    return compared(jobs, known, noisy(noise, seed))


def _of_traces(stages: bool = True) -> PaperTable:
    rows, ratios = [], []
    for (trace, first), known in product(TRACES, (True, False)):
        found = of_trace(trace, first, known, stages)
        jobs = trace if first is None else f"{trace}, first {first}"
        ratios.append(found.ratio)
        rows.append(_row(f"{jobs}, run times {_KNOWN[known]}", found))
    rows.append(Row("geometric mean", geometric_mean(ratios), reach=GEOMETRIC if stages else None))
    key, title = (
        ("interleave-traces", "")
        if stages
        else ("interleave-alone", ", no stages known: only the order differs")
    )
    return PaperTable(
        key,
        f"Profile interleave by the rules of Muri's simulator{title}: mean JCT, SRSF or Tiresias over it",
        "times",
        rows,
    )


def _of_mixes() -> PaperTable:
    rows, of_load = [], {load: list[Outcome]() for load in LOADS}
    for seed, (one_gpu, load, noise, known) in enumerate(product(ONE_GPU, LOADS, NOISES, (True, False))):
        label = f"one GPU {one_gpu:.0%}, load {load}, noise {noise}, run times {_KNOWN[known]}"
        found = of_mix(seed, one_gpu, load, noise, known)
        of_load[load].append(found)
        rows.append(_row(label, found))
    for load, outcomes in of_load.items():
        rows.append(_mean(f"geometric mean of load {load}", outcomes))
    rows.append(_mean("geometric mean", [one for some in of_load.values() for one in some], GEOMETRIC))
    title = (
        "Profile interleave on generated mixes, by the rules of Muri's simulator: mean JCT, SRSF or "
        "Tiresias over it"
    )
    return PaperTable("interleave-mixes", title, "times", rows, f"{JOBS} jobs each, one seed.")


def _mean(label: str, outcomes: Sequence[Outcome], reach: float | None = None) -> Row:
    bound = geometric_mean([one.bound for one in outcomes])
    here = geometric_mean([one.ratio for one in outcomes])
    return Row(label, here, reach=reach, remark=f"{bound:.3f} if no job ever waited")


def _row(label: str, found: Outcome) -> Row:
    """Equal within a thousandth is not below."""
    return Row(label, found.ratio, reach=EQUAL, remark=f"{found.restarts:.2f} restarts per job")


def tables() -> Iterator[PaperTable]:
    yield _of_traces()
    yield _of_mixes()


def alone() -> Iterator[PaperTable]:
    """traces without stages: only the order differs"""
    yield _of_traces(stages=False)


def few() -> Iterator[PaperTable]:
    """mixes in which hardly any job waits"""
    rows = []
    for (load, first), cost, noise in product(FEW, (True, False), (0.0, 1.0)):
        found = [of_mix(seed, 0.9, load, noise, True, cost).ratio for seed in (first, *FEW_SEEDS)]
        here, interval = mean(found)
        label = f"load {load}, noise {noise}, starts {'cost' if cost else 'cost nothing'}"
        rows.append(
            Row(
                label,
                here,
                interval=interval,
                remark=f"least {min(found):.3f}, of seed {first} {found[0]:.3f}",
            )
        )
    title = "Mixes of 90 % one-GPU jobs, run times known: mean JCT, SRSF over interleave"
    yield PaperTable("interleave-few", title, "times", rows)


if __name__ == "__main__":
    main("tests.papers.muri.muri_interleave", tables, alone=alone, few=few)
