"""Profile `interleave` under the rules of Muri's simulator, on traces and generated mixes: `python -m tests.papers.muri_interleave` (two minutes).

Each line: average JCT without groups (SRSF where run times are known, else Tiresias) as a multiple of ours, and ours restarts per job.

What is due to what: `--alone`: no stages are known, so no jobs share, and only the order differs; `--few`: the mixes in which hardly any job waits, run times known, over several seeds, with stage
times that are right or wrong, and with starts that cost or cost nothing.
"""

import os
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import product
from math import inf
from pathlib import Path
from statistics import geometric_mean

from penstock.model.settings import TIRESIAS_LIMITS_GPU_S
from penstock.policies.group_plan import group_plan
from penstock.policies.group_search import MAX_IN_ORDER
from penstock.policies.interleave import Interleave
from tests.papers import muri_reference as reference
from tests.papers.muri_mixes import mix, noisy
from tests.papers.muri_planned import Planned, Profiled, measured

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data")) / "muri"
TRACES = (
    ("trace3", None), ("job_type_1", None), ("job_type_2", None), ("job_type_3", None), ("job_type_4", None),
    ("trace1", 300), ("trace2", 300), ("trace4", 400), ("trace1_pr", 300), ("trace3_pr", 300),
)  # fmt: skip
"""Name, and of the long ones so many of the first jobs: without groups their queues grow for the whole trace."""
ONE_GPU, LOADS, NOISES, JOBS = (0.0, 0.5, 0.9, 1.0), (0.5, 1.0, 1.5), (0.0, 0.5, 1.0), 200
EQUAL = 0.999
FEW, FEW_SEEDS = ((1.0, 46), (1.5, 52)), range(5_000, 5_005)
"""(load, seed of `of_mixes`) of mixes with 90 % one-GPU jobs, and the further seeds."""


def no_stages(job: reference.Job) -> tuple[float, float, float, float]:
    return 0.0, 0.0, 0.0, 0.0


def ours(known: bool, profiled: Profiled = measured) -> Planned:
    """`known`: whether run times are."""
    stage = Interleave(TIRESIAS_LIMITS_GPU_S, group_plan)

    def key(job: reference.Job) -> float:
        return stage.key(job.time_left if known else inf, job.attained, job.gpus)

    truth = reference.Muri(known=known)
    return Planned(stage.solve, key, known=known, profiled=profiled, listed=MAX_IN_ORDER, truth=truth)


def without_groups(jobs: list[reference.Job], known: bool) -> float:
    """Mean JCT, s."""
    return reference.simulate(jobs, reference.srsf() if known else reference.Tiresias()).mean_jct


def of_traces(profiled: Profiled = measured) -> Iterator[tuple[str, float, float]]:
    """(what, ratio, restarts per job)."""
    for (trace, first), known in product(TRACES, (True, False)):
        alone = without_groups(reference.read(DATA, trace, first), known)
        shared = reference.simulate(reference.read(DATA, trace, first), ours(known, profiled))
        jobs = trace if first is None else f"{trace}, first {first}"
        what = f"{jobs}, run times {'known' if known else 'unknown'}"
        yield what, alone / shared.mean_jct, shared.restarts


def of_mixes() -> Iterator[tuple[str, float, float]]:
    """As `of_traces`."""
    for seed, (one_gpu, load, noise, known) in enumerate(product(ONE_GPU, LOADS, NOISES, (True, False))):
        mixes = [mix(DATA, seed, one_gpu=one_gpu, load=load, jobs=JOBS) for _ in range(2)]
        alone = without_groups(mixes[0], known)
        shared = reference.simulate(mixes[1], ours(known, noisy(noise, seed)))
        what = (
            f"one GPU {one_gpu:.0%}, load {load}, noise {noise}, run times {'known' if known else 'unknown'}"
        )
        yield what, alone / shared.mean_jct, shared.restarts


def of_few() -> Iterator[tuple[str, float, float]]:
    """As `of_traces`."""
    for (load, first), costs, noise in product(FEW, (True, False), (0.0, 1.0)):
        for seed in (first, *FEW_SEEDS):
            mixes = [mix(DATA, seed, one_gpu=0.9, load=load, jobs=JOBS) for _ in range(2)]
            for job in (*mixes[0], *mixes[1]):
                job.overhead *= costs
            alone = without_groups(mixes[0], known=True)
            shared = reference.simulate(mixes[1], ours(True, noisy(noise, seed)))
            what = f"one GPU 90%, load {load}, noise {noise}, starts {'cost' if costs else 'cost nothing'}, seed {seed}"
            yield what, alone / shared.mean_jct, shared.restarts


def main() -> None:
    parser = ArgumentParser(prog="python -m tests.papers.muri_interleave")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--alone", action="store_true", help="traces without stages: only the order differs")
    which.add_argument("--few", action="store_true", help="mixes in which hardly any job waits")
    asked = parser.parse_args()
    if asked.alone:
        report("traces without stages", of_traces(no_stages))
    elif asked.few:
        report("mixes in which few wait", of_few())
    else:
        report("traces", of_traces())
        report("mixes", of_mixes())


def report(name: str, rows: Iterator[tuple[str, float, float]]) -> None:
    found = []
    for what, ratio, restarts in rows:
        found.append(ratio)
        print(f"{what}: {ratio:.3f}, {restarts:.2f} restarts", flush=True)
    below = sum(ratio < EQUAL for ratio in found)
    print(
        f"{name}: geometric mean {geometric_mean(found):.3f}, least {min(found):.3f}, {below} of {len(found)} below {EQUAL}"
    )


if __name__ == "__main__":
    main()
