"""Profile `interleave` under the rules of Muri's simulator, on generated mixes: `python -m tests.papers.muri_interleave` (minutes).

Each line: average JCT without groups (SRSF where run times are known, else Tiresias) as a multiple of ours, and ours restarts per job.
"""

import os
from itertools import product
from math import exp, inf, log
from pathlib import Path

from penstock.model.settings import TIRESIAS_LIMITS_GPU_S
from penstock.policies.group_plan import group_plan
from penstock.policies.group_search import MAX_IN_ORDER
from penstock.policies.interleave import Interleave
from tests.papers import muri_reference as reference
from tests.papers.muri_mixes import mix, noisy
from tests.papers.muri_planned import Planned, Profiled, measured

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2] / "../shared/data")) / "muri"
ONE_GPU, LOADS, NOISES, JOBS = (0.0, 0.5, 0.9, 1.0), (0.5, 1.0, 1.5), (0.0, 0.5, 1.0), 200


def ours(known: bool, profiled: Profiled = measured) -> Planned:
    """`known`: whether run times are."""
    stage = Interleave(TIRESIAS_LIMITS_GPU_S, group_plan)

    def key(job: reference.Job) -> float:
        return stage.key(job.time_left if known else inf, job.attained, job.gpus)

    truth = reference.Muri(known=known)
    return Planned(stage.solve, key, known=known, profiled=profiled, listed=MAX_IN_ORDER, truth=truth)


def main() -> None:
    found = []
    for seed, (one_gpu, load, noise, known) in enumerate(product(ONE_GPU, LOADS, NOISES, (True, False))):
        mixes = [mix(DATA, seed, one_gpu=one_gpu, load=load, jobs=JOBS) for _ in range(2)]
        alone = reference.simulate(mixes[0], reference.srsf() if known else reference.Tiresias())
        shared = reference.simulate(mixes[1], ours(known, noisy(noise, seed)))
        found.append(alone.mean_jct / shared.mean_jct)
        what = (
            f"one GPU {one_gpu:.0%}, load {load}, noise {noise}, run times {'known' if known else 'unknown'}"
        )
        print(f"{what}: {found[-1]:.3f}, {shared.restarts:.2f} restarts", flush=True)
    mean = exp(sum(map(log, found)) / len(found))
    below = sum(ratio < 1 for ratio in found)
    print(f"geometric mean {mean:.3f}, least {min(found):.3f}, {below} of {len(found)} below 1")


if __name__ == "__main__":
    main()
