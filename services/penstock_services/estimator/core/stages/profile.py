"""How long one iteration of a job uses storage, CPU, GPU and network: its stages, for interleaving.

Source: Muri §4.2 (handling multi-resource usage in practice) and §5 (resource profiler). Usage is normalised to its own
peak, the highest resource of an instant is the one used, usage under a threshold is none. Departures, each by an
option: `least` drops what is small against the machine before normalising, since a peak of 1 MB/s would otherwise
count like one of 10 GB/s. The paper leaves open the threshold (here 10 % of the peak), what a tie is (the earlier
stage) and what an instant without usage is (no stage: `idle_ms`).
"""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

RESOURCES = ("storage", "cpu", "gpu", "network")
"""In stage order."""
THRESHOLD = 0.1  # of the peak
MIN_ITERATIONS = 10  # "tens of iterations" make a stable profile
MAX_SAMPLES = 1_000_000
MAX_ITERATION_MS = 86_400_000.0

Usage = tuple[float, float, float, float]
"""Of each of RESOURCES, ≥ 0, each in a unit of its own."""
NOTHING: Usage = (0.0, 0.0, 0.0, 0.0)


class Sample(NamedTuple):
    """What a job used during `lasted_ms`."""

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
    """How many it rests on."""

    @property
    def stages_ms(self) -> Usage:
        """In the order of RESOURCES."""
        return self.storage_ms, self.cpu_ms, self.gpu_ms, self.network_ms


class StageKey(NamedTuple):
    """What a profile is reused for."""

    model: str
    batch: int
    gpus: int


def stage_profile(
    samples: Sequence[Sample], iterations: int, threshold: float = THRESHOLD, least: Usage = NOTHING
) -> StageProfile:
    """From samples over whole iterations. `least`: usage of each resource under which it counts as none.

    Raises `ValueError` with everything that is wrong; at most the first ten samples are named.
    """
    _check(samples, iterations, threshold, least)
    used = [
        (lasted, [value if value >= low else 0.0 for value, low in zip(usage, least, strict=True)])
        for lasted, usage in samples
    ]
    peaks = [max(usage[resource] for _, usage in used) for resource in range(len(RESOURCES))]
    stages, idle = [0.0] * len(RESOURCES), 0.0
    for lasted, usage in used:
        shares = [value / peak if peak > 0 else 0.0 for value, peak in zip(usage, peaks, strict=True)]
        highest = max(shares)
        if highest >= threshold and highest > 0:
            stages[shares.index(highest)] += lasted
        else:
            idle += lasted
    storage, cpu, gpu, network = (total / iterations for total in stages)
    whole = (sum(stages) + idle) / iterations
    return StageProfile(storage, cpu, gpu, network, idle / iterations, whole, iterations)


def mean_profile(one: StageProfile, other: StageProfile) -> StageProfile:
    """Weighted by iterations; what is old never weighs more than 100 times MIN_ITERATIONS."""
    before = min(one.iterations, 100 * MIN_ITERATIONS)
    total = before + other.iterations
    storage, cpu, gpu, network, idle, whole = (
        (old * before + new * other.iterations) / total for old, new in zip(one[:-1], other[:-1], strict=True)
    )
    return StageProfile(storage, cpu, gpu, network, idle, whole, total)


def _check(samples: Sequence[Sample], iterations: int, threshold: float, least: Usage) -> None:
    problems: list[str] = []
    if not 0 < len(samples) <= MAX_SAMPLES:
        problems.append(f"{len(samples)} samples: must be 1 to {MAX_SAMPLES}")
    if iterations < 1:
        problems.append(f"{iterations} iterations: must be 1 or more")
    if not 0 <= threshold <= 1:
        problems.append(f"threshold {threshold}: must be 0 to 1")
    if len(least) != len(RESOURCES) or not all(isfinite(value) and value >= 0 for value in least):
        problems.append(f"least {least}: must be one number ≥ 0 for each of {', '.join(RESOURCES)}")
    wrong = [(place, reason) for place, one in enumerate(samples[:MAX_SAMPLES]) if (reason := _wrong(one))]
    problems += [f"sample {place}: {reason}" for place, reason in wrong[:10]]
    if len(wrong) > 10:
        problems.append(f"and {len(wrong) - 10} more")
    if problems:
        raise ValueError("; ".join(problems))


def _wrong(sample: Sample) -> str:
    if not (isfinite(sample.lasted_ms) and 0 < sample.lasted_ms <= MAX_ITERATION_MS):
        return f"lasted {sample.lasted_ms} ms, must be above 0 and at most {MAX_ITERATION_MS:.0f}"
    if len(sample.usage) != len(RESOURCES):
        return f"{len(sample.usage)} usages, must be {len(RESOURCES)}: {', '.join(RESOURCES)}"
    for name, value in zip(RESOURCES, sample.usage, strict=True):
        if not (isfinite(value) and value >= 0):
            return f"{name} {value}, must be a number ≥ 0"
    return ""
