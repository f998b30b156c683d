"""GENIE's prediction model, exactly (profile `genie`).

Source: GENIE §II-B, eq. 1–3. The paper says "fitted from profiling" and no more; here it is two linear
least-squares problems, one after the other: the quadratic of one GPU's speed from the runs on one GPU, then
λ1 and λ2 from the runs on more. What the model says where it breaks down (a speed of 0 or less) is said as
such: throughput 0 and an endless latency. The interval is ours: the paper gives none.
"""

from collections.abc import Sequence
from math import exp, inf, isfinite, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from penstock_services.estimator.core.records.placements import (
    MAX_GPUS_PER_NODE,
    MAX_LOCAL_BATCH,
    MAX_NODES,
    Placement,
    why_no_placement,
)

COEFFICIENTS = 3  # of a quadratic
PENALTIES = 2  # λ1 and λ2
DOUBT_RUNS = 3.0  # weight, in runs, of the doubt below against the errors of the fit
DOUBT = 0.08  # of ln throughput: a 95th percentile of 13 % (§IV-B) is 0.065; a little more before any run
MAX_RUNS = 100_000


class Task(NamedTuple):
    """Source: GENIE §II-B, t_i = ⟨b_i, r_i⟩."""

    batch: float
    """Global: samples per iteration over all GPUs."""
    iterations: float
    trains: bool = True
    """False: inference, whose GPUs do not synchronise."""


class Prediction(NamedTuple):
    """`low_…` and `high_…` bound each with the probability asked for."""

    step_s: float
    throughput: float
    """Samples per second."""
    low_throughput: float
    high_throughput: float
    latency_s: float
    """From the start on the GPUs to the last iteration."""
    low_latency_s: float
    high_latency_s: float


class Run(NamedTuple):
    """One profiling run of a task type: `throughput` in samples per second over all GPUs."""

    batch: float
    nodes: int
    gpus_per_node: int
    throughput: float


class Genie(NamedTuple):
    """A fitted task type. `speed`: c0, c1, c2 of one GPU's samples per second, c0 + c1·b̄ + c2·b̄²."""

    speed: tuple[float, float, float]
    between_nodes: float
    """λ1."""
    within_node: float
    """λ2."""
    spread: float
    """Standard deviation of ln throughput around the model."""
    freedom: float


def light_profile(
    batches: Sequence[float], nodes: Sequence[int], gpus_per_node: Sequence[int], batch: float
) -> list[tuple[float, int, int]]:
    """(global batch, n, g) of the B + N + G runs, each once: batches on ⟨1, 1⟩, then ⟨n, 1⟩ and ⟨1, g⟩ at
    `batch`."""
    runs = [(size, 1, 1) for size in batches]
    runs += [(batch, count, 1) for count in nodes]
    runs += [(batch, 1, count) for count in gpus_per_node]
    return list(dict.fromkeys(runs))


def overhead(nodes: int, gpus_per_node: int, between_nodes: float, within_node: float) -> float:
    """o_ij, eq. 3: the average path between GPUs, in GPUs lost; 0 for one GPU."""
    if nodes == gpus_per_node == 1:
        return 0.0
    path = between_nodes * (nodes - 1) * gpus_per_node + within_node * (gpus_per_node - 1)
    return path / (nodes * gpus_per_node - 1)


def fit_genie(runs: Sequence[Run]) -> Genie:
    """Needs one batch on one GPU; with fewer than three, the quadratic has as many terms as there are
    batches.

    λ1 and λ2 that nothing was measured of are 0. Raises `ValueError` with every wrong run.
    """
    problems = [f"run {index}: {reason}" for index, run in enumerate(runs) if (reason := _wrong(run))]
    alone = [run for run in runs if run.nodes == run.gpus_per_node == 1]
    if not alone:
        problems.append("no run on one GPU: profile at least one batch on ⟨1, 1⟩")
    if len(runs) > MAX_RUNS:
        problems.append(f"{len(runs)} runs: at most {MAX_RUNS}")
    if problems:
        raise ValueError("; ".join(problems))
    speed = _quadratic(alone)
    more = [run for run in runs if run.nodes * run.gpus_per_node > 1]
    between_nodes, within_node = _penalties(more, speed)
    fitted = Genie(speed, between_nodes, within_node, 0.0, 0.0)
    off = [log(run.throughput / found) for run in runs if (found := _of(fitted, run)) > 0]
    free = max(0, len(off) - COEFFICIENTS - PENALTIES)
    squares = sum(error**2 for error in off) + DOUBT_RUNS * DOUBT**2
    return fitted._replace(spread=sqrt(squares / (free + DOUBT_RUNS)), freedom=free + DOUBT_RUNS)


def startup_s(history: Sequence[float], default_s: float) -> float:
    """ν: the median of the start-ups seen, in seconds; `default_s` where none can be used."""
    usable = [value for value in history if isfinite(value) and value >= 0]
    return median(usable) if usable else default_s


def throughput(model: Genie, task: Task, nodes: int, gpus_per_node: int) -> float:
    """p_ij, eq. 1, in samples per second; 0 where the quadratic or the overhead leaves nothing."""
    gpus = nodes * gpus_per_node
    between, within = (model.between_nodes, model.within_node) if task.trains else (0.0, 0.0)
    lost = overhead(nodes, gpus_per_node, between, within)
    return max(0.0, gpus - lost) * max(0.0, _speed(model.speed, task.batch / gpus))


def predict_genie(
    model: Genie, task: Task, nodes: int, gpus_per_node: int, startup_s: float = 0.0, level: float = 0.9
) -> Prediction:
    """Eq. 1 and 2, with an interval that holds a run with probability `level`."""
    found = throughput(model, task, nodes, gpus_per_node)
    wide = exp(model.spread * float(stdtrit(model.freedom, (1.0 + level) / 2.0)))
    samples = task.batch * task.iterations

    def latency(speed: float) -> float:
        return samples / speed + startup_s if speed > 0 else inf

    return Prediction(
        step_s=task.batch / found if found > 0 else inf,
        throughput=found,
        low_throughput=found / wide,
        high_throughput=found * wide,
        latency_s=latency(found),
        low_latency_s=latency(found * wide),
        high_latency_s=latency(found / wide),
    )


def _of(model: Genie, run: Run) -> float:
    return throughput(model, Task(run.batch, 1), run.nodes, run.gpus_per_node)


def _speed(coefficients: tuple[float, float, float], local_batch: float) -> float:
    constant, linear, square = coefficients
    return constant + local_batch * (linear + local_batch * square)


def _quadratic(alone: Sequence[Run]) -> tuple[float, float, float]:
    batches = np.array([run.batch for run in alone])
    terms = min(COEFFICIENTS, len(set(batches.tolist())))
    scale = fmean(batches.tolist())  # keeps the squares of large batches from swallowing the constant
    powers = (batches[:, None] / scale) ** np.arange(terms)
    found, *_ = np.linalg.lstsq(powers, np.array([run.throughput for run in alone]), rcond=None)
    constant, linear, square = (*found.tolist(), 0.0, 0.0)[:COEFFICIENTS]
    return constant, linear / scale, square / scale**2


def _penalties(more: Sequence[Run], speed: tuple[float, float, float]) -> tuple[float, float]:
    """λ1, λ2 by least squares on n·g·p̄ − p = o·p̄; the smallest that fit where the runs leave them open."""
    if not more:
        return 0.0, 0.0
    alone = [_speed(speed, run.batch / (run.nodes * run.gpus_per_node)) for run in more]
    paths = np.array(
        [
            [each * overhead(run.nodes, run.gpus_per_node, *weights) for weights in ((1.0, 0.0), (0.0, 1.0))]
            for run, each in zip(more, alone, strict=True)
        ]
    )
    lost = [
        run.nodes * run.gpus_per_node * each - run.throughput for run, each in zip(more, alone, strict=True)
    ]
    found, *_ = np.linalg.lstsq(paths, np.array(lost), rcond=None)
    return float(found[0]), float(found[1])


def _wrong(run: Run) -> str:
    if not (isfinite(run.throughput) and run.throughput > 0):
        return f"throughput {run.throughput} is not above 0"
    if not (isfinite(run.batch) and 0 < run.batch <= MAX_LOCAL_BATCH):
        return f"batch {run.batch} is not above 0 and at most {MAX_LOCAL_BATCH}"
    if not (1 <= run.nodes <= MAX_NODES and 1 <= run.gpus_per_node <= MAX_GPUS_PER_NODE):
        return f"⟨{run.nodes}, {run.gpus_per_node}⟩ is not within ⟨1–{MAX_NODES}, 1–{MAX_GPUS_PER_NODE}⟩"
    return ""


def check_asked(task: Task, placement: Placement) -> None:
    """Raises `ValueError` with everything that is wrong."""
    problems = [
        f"{name} {value} is not above 0"
        for name, value in (("batch", task.batch), ("iterations", task.iterations))
        if not 0 < value < inf
    ]
    if reason := why_no_placement(placement):
        problems.append(reason)
    if problems:
        raise ValueError("; ".join(problems))


def prediction(log_step_s: float, width: float, task: Task, startup_s: float) -> Prediction:
    """From ln of a step and the half-width of its interval."""
    steps = [exp(log_step_s + sign * width) if sign * width < inf else inf for sign in (0, -1, 1)]
    middle, low, high = steps
    return Prediction(
        step_s=middle,
        throughput=task.batch / middle,
        low_throughput=task.batch / high,
        high_throughput=task.batch / low,
        latency_s=task.iterations * middle + startup_s,
        low_latency_s=task.iterations * low + startup_s,
        high_latency_s=task.iterations * high + startup_s,
    )
