"""Stage profile of a job: how long one iteration uses storage, CPU, GPU and network, for interleaving.

Source: Muri §4.2 (handling multi-resource usage in practice) and §5 (resource profiler). Usage is normalised
to its own peak, the highest resource of an instant is the one used, usage under a threshold counts as none.
Departure: usage below `least` is dropped before normalising, since a peak of 1 MB/s would otherwise count
like one of 10 GB/s. The paper does not define the threshold (here 10 % of the peak), a tie (the earlier
stage) and an instant without usage (no stage: `idle_ms`).
"""

from collections.abc import Sequence
from typing import NamedTuple

RESOURCES = ("storage", "cpu", "gpu", "network")
"""In stage order."""
THRESHOLD = 0.1  # of the peak
MIN_ITERATIONS = 10  # "tens of iterations" make a stable profile

Usage = tuple[float, float, float, float]
"""Of each of RESOURCES, ≥ 0, each in a unit of its own."""
NOTHING: Usage = (0.0, 0.0, 0.0, 0.0)  # of any resource


class Sample(NamedTuple):
    """Usage of a job during `lasted_ms`."""

    lasted_ms: float
    usage: Usage


class StageProfile(NamedTuple):
    """Means per iteration, in ms; the four stages and `idle_ms` add up to `iteration_ms`."""

    storage_ms: float
    cpu_ms: float
    gpu_ms: float
    network_ms: float
    idle_ms: float
    iteration_ms: float
    iterations: int
    """Number of measured iterations."""


class StageKey(NamedTuple):
    """Jobs with this key reuse a profile."""

    model: str
    batch: int
    gpus: int


def stage_profile(samples: Sequence[Sample], iterations: int, least: Usage = NOTHING) -> StageProfile:
    """From at least one sample, over at least one whole iteration. `least`: usage of each resource under
    which it counts as none."""
    used = [
        (lasted, [value if value >= low else 0.0 for value, low in zip(usage, least, strict=True)])
        for lasted, usage in samples
    ]
    peaks = [max(usage[resource] for _, usage in used) for resource in range(len(RESOURCES))]
    stages, idle = [0.0] * len(RESOURCES), 0.0
    for lasted, usage in used:
        shares = [value / peak if peak > 0 else 0.0 for value, peak in zip(usage, peaks, strict=True)]
        highest = max(shares)
        if highest >= THRESHOLD:
            stages[shares.index(highest)] += lasted
        else:
            idle += lasted
    storage, cpu, gpu, network = (total / iterations for total in stages)
    whole = (sum(stages) + idle) / iterations
    return StageProfile(storage, cpu, gpu, network, idle / iterations, whole, iterations)


def mean_profile(one: StageProfile, other: StageProfile) -> StageProfile:
    """Mean weighted by iterations; older ones weigh at most 100 times MIN_ITERATIONS."""
    before = min(one.iterations, 100 * MIN_ITERATIONS)
    total = before + other.iterations
    storage, cpu, gpu, network, idle, whole = (
        (old * before + new * other.iterations) / total for old, new in zip(one[:-1], other[:-1], strict=True)
    )
    return StageProfile(storage, cpu, gpu, network, idle, whole, total)
