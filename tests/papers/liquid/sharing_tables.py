"""Liquid §6.2, Fig. 15: total time of sequences of jobs on one GPU, shared against exclusive.

`python -m tests.papers.liquid.sharing_tables --json FILE --page FILE`. The sequences are the paper's: 8 ×
CNN-MNIST, 4 × NeuMF, and two of each in random order, all there from the start. Everything else is measured
elsewhere or assumed, and said here:

- *Speeds* beside each other are Gavel's measured pairs. CNN-MNIST was not measured there: ResNet-18 on 32 ×
  32 images stands in, at its small batches; for NeuMF on MovieLens Recommendation, an autoencoder on the same
  data. All jobs of one kind in a sequence have the same batch size, drawn from those measured, as the paper
  repeats one job. T4 was not measured: P100 (9.5 TFLOPS against 8.1) and V100 (the generation before) stand
  in.
- *Launch and save* leave the GPU idle and overlap with the neighbour's training: 18 + 5 s, as job model
  `phases` has them. Liquid Fig. 12a shows 28 s without computing between two jobs, of which up to 5 s are its
  heartbeat. The rows without them ablate that.
- *Training* takes 30 – 120 s alone, log-uniform: the paper's figures show jobs of minutes. This is an
  assumption; the ablation gives the figure over it.
- *Predictions*: the paper says that both programs use less than half a GPU in the mean, so that two fit.
  Taken as 50 % and 45 % of the memory.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations_with_replacement
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, PairSpeed
from penstock.scheduling.place.measured_pairs import refused
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.colocation import Colocation, Config, Throughputs
from penstock.simulator.job_models.measurements.tables import read_throughputs
from penstock.simulator.job_models.model import JobModel
from penstock.simulator.job_models.sharing import LAUNCH_S, SAVE_S, Phases
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import GPU_MEMORY_MIB, nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import mean
from tests.papers.tables import PaperTable, Row, main
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "gavel"
SEEDS = 40
SMALL = (16, 32, 64)
"""Batch sizes of ResNet-18 that stand for CNN-MNIST, whose network is small."""
KINDS = {"CNN-MNIST": "ResNet-18", "NeuMF": "Recommendation"}
SEQUENCES = {
    "CNN-MNIST*8": ("CNN-MNIST",) * 8,
    "NeuMF*4": ("NeuMF",) * 4,
    "Mixed*4": ("CNN-MNIST", "CNN-MNIST", "NeuMF", "NeuMF"),
}
PUBLISHED = {
    "k80": {"CNN-MNIST*8": -38.0, "NeuMF*4": -33.0, "Mixed*4": -47.0},
    "p100": {"CNN-MNIST*8": -40.0, "NeuMF*4": -41.0, "Mixed*4": -41.0},
    "v100": {"CNN-MNIST*8": -40.0, "NeuMF*4": -41.0, "Mixed*4": -41.0},
}
"""Percent. Source: Liquid §7.3.2; of the T4 for P100 and V100."""
TRAIN_S = (30.0, 120.0)
UTILISATION_PERCENT, MEMORY_MIB = 50.0, GPU_MEMORY_MIB * 45 // 100

MEASURING_ERROR = 0.1
"""Of a speed, relative, log-normal: step times of short windows scatter so much."""

Share = Literal["never", "fits", "learned"]
SHARED: tuple[Share, ...] = ("fits", "learned")


class Truth(NamedTuple):
    """What a sequence runs under."""

    gpu: str
    launch_s: float = LAUNCH_S
    save_s: float = SAVE_S
    train_s: tuple[float, float] = TRAIN_S


def sequence(kinds: Sequence[str], table: Throughputs, truth: Truth, seed: int) -> list[TraceJob]:
    """Jobs of the stand-ins, all submitted at once; `mixed` ones in random order."""
    rng = np.random.default_rng((seed, len(kinds)))
    batch: dict[str, int] = {}
    for kind in sorted(set(kinds)):
        known = sorted(
            config.batch
            for config in table.consolidated
            if config.batch is not None
            and (config.gpu, config.model, config.gpus) == (truth.gpu, KINDS[kind], 1)
            and (kind != "CNN-MNIST" or config.batch in SMALL)
        )
        batch[kind] = int(rng.choice(known))
    train_s = float(np.exp(rng.uniform(*np.log(truth.train_s))))
    return [
        TraceJob(f"{number}", 0.0, train_s, 1, KINDS[kind], batch[kind], "liquid")
        for number, kind in enumerate(rng.permutation(np.array(kinds)).tolist())
    ]


def pairs_of(table: Throughputs, gpu: str, model: str, batch: int | None) -> tuple[PairSpeed, ...]:
    """What a cell that has run each pair before would have learned."""
    mine = Config(gpu, model, batch, 1)
    return tuple(
        PairSpeed(
            model=other.model,
            batch_size=other.batch,
            gpu_model=gpu,
            own=min(2.0, rate / table.consolidated[mine]),
            other=min(2.0, table.pairs[other, one] / table.consolidated[other]),
            runs=1,
        )
        for (one, other), rate in table.pairs.items()
        if one == mine and other.model in KINDS.values() and (other, one) in table.pairs
    )


@cache
def measured() -> Throughputs:
    return read_throughputs(DATA)


@simulated(1.0)
def total_s(name: str, truth: Truth, share: Share, seed: int) -> float:
    """Until the last job of the sequence has ended, through the placer and the simulated nodes."""
    table = measured()
    jobs = sequence(SEQUENCES[name], table, truth, seed)

    def predicts(job: TraceJob, estimate: Estimate) -> Estimate:
        worker = msgspec.structs.replace(
            estimate.worker, gpu_utilisation_percent=UTILISATION_PERCENT, gpu_memory_mib=MEMORY_MIB
        )
        pairs = pairs_of(table, truth.gpu, job.model, job.batch_size)
        return msgspec.structs.replace(estimate, worker=worker, pairs=pairs)

    nodes = nodes_of(f"1x1@{truth.gpu}")
    model: JobModel = Colocation(table, truth.gpu, {}, 1)
    if truth.launch_s or truth.save_s:
        model = Phases(model, truth.launch_s, truth.save_s)
    settings = PlacerSettings(profile="liquid", share_gpus=share)
    run = Simulation(nodes, settings, SteadyWork(model), jobs, Options(predicts=predicts))
    while run.step():
        pass
    figures = run.figures(1.0, 1.0)
    assert figures.finished_jobs == len(jobs), "every job ends"
    return figures.makespan_s


def change(name: str, truth: Truth, share: Share, seeds: int) -> list[float]:
    """Percent by which sharing changes the total time, seed by seed."""
    return [
        100 * (total_s(name, truth, share, seed) / total_s(name, truth, "never", seed) - 1)
        for seed in range(seeds)
    ]


def bound(name: str, truth: Truth, seeds: int) -> list[float]:
    """Percent by which any schedule of at most two at once can change the total time: the fastest pair all
    the time, and launches and saves but the first and the last hidden."""
    table, found = measured(), []
    for seed in range(seeds):
        jobs = sequence(SEQUENCES[name], table, truth, seed)
        configs = {Config(truth.gpu, job.model, job.batch_size, 1) for job in jobs}
        progress = [
            table.pairs[one, other] / table.consolidated[one]
            + table.pairs[other, one] / table.consolidated[other]
            for one, other in combinations_with_replacement(sorted(configs, key=str), 2)
            if (one, other) in table.pairs
        ]
        least_s = truth.launch_s + sum(job.duration_s for job in jobs) / max(1.0, *progress) + truth.save_s
        found.append(100 * (least_s / total_s(name, truth, "never", seed) - 1))
    return found


def row(label: str, found: Sequence[float], published: float | None, reach: float | None, remark: str) -> Row:
    here, interval = mean(found)
    return Row(label, here, published, interval, reach, "lower", remark)


def tables() -> Iterator[PaperTable]:
    """Total time by sequence and GPU, and what it consists of."""
    for gpu, stands_for in (("k80", "K80"), ("p100", "T4"), ("v100", "T4")):
        truth, rows = Truth(gpu), []
        for name in SEQUENCES:
            for share in SHARED:
                found = change(name, truth, share, SEEDS)
                published = PUBLISHED[gpu][name] if share == "fits" else None
                rows.append(row(f"{name}, {share}", found, published, published, ""))
            remark = "no schedule of two at once saves more"
            rows.append(row(f"{name}, bound", bound(name, truth, SEEDS), None, None, remark))
        yield PaperTable(f"sharing-{gpu}", f"Sharing, total time on {gpu} for {stands_for}", "% change", rows)
    yield _ablation()
    yield _refusals(measured(), SEEDS)


def _ablation() -> PaperTable:
    rows = []
    cases = (
        ("speeds alone", Truth("k80", 0.0, 0.0)),
        ("and 18 + 5 s of launch and save", Truth("k80")),
        ("the same, training 10 - 30 s", Truth("k80", train_s=(10.0, 30.0))),
        ("the same, training 120 - 600 s", Truth("k80", train_s=(120.0, 600.0))),
    )
    for label, truth in cases:
        for gpu in ("k80", "p100", "v100"):
            found = [
                value for name in SEQUENCES for value in change(name, truth._replace(gpu=gpu), "fits", SEEDS)
            ]
            rows.append(row(f"{gpu}: {label}", found, None, None, "three sequences"))
    return PaperTable("sharing-ablation", "Where the time is saved", "% change", rows)


def _refusals(table: Throughputs, seeds: int) -> PaperTable:
    """Each measured pair of one-GPU jobs is run once, its speeds measured with an error, and judged by that
    the next time it comes."""
    rng, rows = np.random.default_rng(0), []
    for gpu in ("k80", "p100", "v100"):
        truth = [
            (own / table.consolidated[one], table.pairs[other, one] / table.consolidated[other])
            for (one, other), own in sorted(table.pairs.items(), key=str)
            if one.gpu == gpu and one.gpus == other.gpus == 1 and (other, one) in table.pairs
        ]
        bad = [refused(_pair(own, other)) for own, other in truth]
        rows.append(Row(f"{gpu}: pairs not worth it, all allowed by fit alone", 100 * fmean(bad)))
        right: list[bool] = []
        wrong: list[bool] = []
        for _ in range(seeds):
            for (own, other), is_bad in zip(truth, bad, strict=True):
                noisy = np.exp(rng.normal(0.0, MEASURING_ERROR, 2))
                (right if is_bad else wrong).append(refused(_pair(own * noisy[0], other * noisy[1])))
        rows.append(Row(f"{gpu}: of these refused after one run", 100 * fmean(right)))
        rows.append(Row(f"{gpu}: of the others refused by mistake", 100 * fmean(wrong), better="lower"))
    note = f"Measuring error {MEASURING_ERROR:.0%} of each speed. A pair that never ran is not refused."
    return PaperTable("sharing-refused", "Pairs kept apart by what was learned", "%", rows, note)


def _pair(own: float, other: float) -> PairSpeed:
    return PairSpeed(gpu_model="gpu", own=own, other=other, runs=1)


if __name__ == "__main__":
    main("tests.papers.liquid.sharing_tables", tables)
