"""`python -m tests.bench.live.prelaunch [PAIRS]`: how long a GPU is idle between two jobs, with
pre-scheduling and without (Liquid §6.1).

`penstock up` on the embedded log, one virtual node with one GPU, the default profile. Pairs of equal jobs
with a launch, iterations and a save, in turn with `prelaunch` and without; of their length and launch the
estimator knows from a few runs before. *Idle*: from the end of the first one's last iteration to the second
one's first, by the phases that both report.
"""

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import NamedTuple

from tests.bench.servers import bench_folder
from tests.support.installation.system import PATIENCE_S, Gateway, installation
from tests.support.trainings.phased_job import phased, times

PAIRS = 15
LEARNING = 3  # runs before
LAUNCH_S, TRAIN_S, SAVE_S = 1.5, 3.0, 0.5
NEED = {"gpus": 1, "cores": 1, "host_memory_mib": 128, "gpu_memory_mib": 1}


class Gap(NamedTuple):
    """Milliseconds."""

    idle_ms: float
    overlap_ms: float
    """From the start of the second one's process to the proven end of the first; negative where it came
    after."""


def pair(gateway: Gateway, *, prelaunch: bool) -> Gap:
    command = phased(LAUNCH_S, TRAIN_S, SAVE_S)
    ids = [gateway.submit(command, name="phased", resources=NEED, prelaunch=prelaunch) for _ in range(2)]
    for job_id in ids:
        row = gateway.until_ended(job_id, PATIENCE_S)
        assert row["outcome"] == "succeeded", row
    first, second = (times(gateway, job_id) for job_id in ids)
    return Gap(second.train_ms - first.save_ms, first.exited_ms - second.started_ms)


def learn(gateway: Gateway) -> None:
    """Runs from which the estimator knows the length and the launch of such jobs."""
    command = phased(LAUNCH_S, TRAIN_S, SAVE_S)
    for _ in range(LEARNING):
        gateway.until_ended(gateway.submit(command, name="phased", resources=NEED), PATIENCE_S)


def measure(gateway: Gateway, pairs: int) -> Mapping[bool, Sequence[Gap]]:
    """Pairs with pre-scheduling (True) and without, in turn."""
    found: dict[bool, list[Gap]] = {False: [], True: []}
    for _ in range(pairs):
        for early in (False, True):
            found[early].append(pair(gateway, prelaunch=early))
    return found


def less_idle(found: Mapping[bool, Sequence[Gap]]) -> float:
    """Share of the mean idle time that pre-scheduling saves, at most 1."""
    return 1 - fmean(gap.idle_ms for gap in found[True]) / fmean(gap.idle_ms for gap in found[False])


def main(pairs: int) -> None:
    with (
        bench_folder() as folder,
        installation(folder / "up", "--nodes", "1", "--virtual-gpus", "1") as gateway,
    ):
        gateway.until_nodes(1)
        learn(gateway)
        found = measure(gateway, pairs)
    for early, gaps in found.items():
        idle, overlap = zip(*gaps, strict=True)
        p90 = quantiles(idle, n=10)[-1]
        name = "with pre-scheduling" if early else "without"
        print(
            f"{name:<20} idle p50 {median(idle):7.0f} ms  p90 {p90:7.0f} ms  "
            f"overlap p50 {median(overlap):7.0f} ms  of {len(gaps)} pairs"
        )
    print(f"idle time {-100 * less_idle(found):+.0f} % in the mean")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS)
