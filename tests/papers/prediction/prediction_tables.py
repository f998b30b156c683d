"""What the papers claim of predictions, on measurements: `python -m
tests.papers.prediction.prediction_tables`.

- Liquid §4 (Fig. 10): R² of the forest and of the four other regressors on 50 runs held out. Its data is not
  published; here 815 runs of nvidia-smi telemetry.
- GENIE §II-B, §III-B: errors of predicted latencies after a light profile of B + N + G runs. Its models are
  not published; here Pollux' six measured networks.
- CODA §V-B1: cores found in at most four probes. Its curves are not published; here the twelve models that
  Synergy measured at 1 to 24 cores.
- Muri table 2: four jobs that take turns on 16 GPUs. Here by their published stage profiles, at the pace that
  the authors' simulator gives groups.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean

import numpy as np

from penstock.model.nouns.types import Category
from penstock.scheduling.acting.core_search import Next, Seen, search, walk
from penstock_services.estimator.core.records.placements import Cell, Measurement, Table, table, why_rejected
from penstock_services.estimator.core.resource_model.measurements import Runs
from penstock_services.estimator.core.resources.cores import PastJob, n_start
from penstock_services.estimator.core.step_time.fit import learn_prior, reference_batch
from penstock_services.estimator.core.step_time.prior import Prior
from tests.papers.estimator.cross_validation import judge_on
from tests.papers.estimator.files.run_files import read_runs
from tests.papers.estimator.models.liquid import REGRESSORS
from tests.papers.estimator.step_validation import MODELS as LEARNERS
from tests.papers.estimator.step_validation import errors, genies_light, light, noise, without
from tests.papers.muri import muri_reference
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import mean
from tests.papers.tables import PaperTable, Row, main
from tests.support.data import DATA_ROOT as DATA

SEEDS = 20
HELD_OUT = 50
R2, P95_PERCENT, PROBES, TABLE_2 = 0.86, 13.0, 4, 2.0
REACH = 0.95  # of what is published of Muri
NETWORKS = ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
LIGHT = 15  # points of a light profile
CATEGORY: Mapping[str, Category] = {
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
MOST_CORES = 24  # of the measured machine
TOGETHER = ("shufflenet_v2_x1_0", "a2c", "gpt2", "vgg16")
Step = Callable[[int, Sequence[Seen], int], Next]
STEPS: Mapping[str, Step] = {"CODA's walk": walk, "ours": search}


@cache
def telemetry() -> Runs:
    return read_runs(DATA / "lambda").runs


@simulated(0.5)
def r2(model: str, seed: int) -> float:
    """Of runs held out, mean over GPU memory, throughput, utilisation and its deviation."""
    runs = telemetry()
    held_out = np.zeros(len(runs), dtype=np.bool_)
    held_out[np.random.default_rng(seed).permutation(len(runs))[:HELD_OUT]] = True
    return fmean(one.r2 for one in judge_on(runs.pick(~held_out), runs.pick(held_out), model, seed).values())


def resources() -> PaperTable:
    rows = []
    for model in REGRESSORS:
        here, interval = mean([r2(model, seed) for seed in range(SEEDS)])
        rows.append(Row(model, here, R2 if model == "liquid" else None, interval))
    note = (
        "The published figure is the most that the forest reached as data grew. How our model does: "
        "`python -m tests.papers.estimator`."
    )
    return PaperTable("liquid-estimator", f"Liquid Fig. 10: R² of {HELD_OUT} runs held out", "R²", rows, note)


@cache
def step_times(network: str) -> Table:
    with (DATA / "pollux/traces" / network / "placements.csv").open() as file:
        runs = [
            Measurement(
                Cell(tuple(map(int, row["placement"])), float(row["local_bsz"])), float(row["step_time"])
            )
            for row in csv.DictReader(file)
        ]
    assert not any(map(why_rejected, runs))
    found = table(runs)
    assert len(found.cells) == len(runs)
    return found


@cache
def taught_without(network: str) -> Prior:
    others = [step_times(other) for other in NETWORKS if other != network]
    return learn_prior(others, np.random.default_rng(1))


@simulated([1.0])
def step_errors(network: str, learner: str) -> list[float]:
    """Relative, of all cells that the light profile leaves out; what other networks teach is known."""
    whole, prior, rng = step_times(network), taught_without(network), np.random.default_rng(0)
    shown = genies_light(whole, LIGHT) if learner == "genie" else light(whole, prior, LIGHT, rng)
    predicted = LEARNERS[learner](shown, prior, reference_batch(whole), rng)
    rest = without(whole, shown)
    return [float(error) for error in errors(predicted(rest.cells), rest).relative]


def latencies() -> PaperTable:
    rows = []
    for learner, label in (("genie", "GENIE's form (eq. 1 – 3), even placements"), ("penstock", "ours")):
        found = [error for network in NETWORKS for error in step_errors(network, learner)]
        rows.append(Row(f"{label}: median", 100 * float(np.median(found))))
        rows.append(Row(f"{label}: 95th percentile", 100 * float(np.quantile(found, 0.95)), P95_PERCENT))
    apart = np.concatenate([noise(step_times(network)) for network in NETWORKS])
    remark = "no model of the means is nearer"
    rows.append(
        Row(
            "one measurement off its own mean: 95th percentile",
            100 * float(np.quantile(apart, 0.95)),
            remark=remark,
        )
    )
    title = f"GENIE: errors of predicted step times after {LIGHT} measured ones"
    return PaperTable("genie-prediction", title, "%", rows)


def core_speeds() -> Mapping[str, Mapping[int, float]]:
    """Model → cores → speed of one GPU, with all memory."""
    found: dict[str, dict[int, float]] = {}
    with (DATA / "synergy/cpu_mem_sensitivity.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["cpu_gpu_ratio_dir"], row["num_gpu"], row["mem_gb"]
            if key == ("models", "1", "250") and row["model"] in CATEGORY:
                found.setdefault(row["model"], {})[int(row["cpus"])] = float(row["relative_tput"])
    assert set(found) == set(CATEGORY)
    return found


def settle(step: Step, start: int, speeds: Mapping[int, float]) -> tuple[int, float, int]:
    """(cores, speed there / best speed in the table, probes after the start); between measured counts speed
    is linear."""

    def speed(cores: int) -> float:
        return float(np.interp(cores, list(speeds), list(speeds.values())))

    seen: list[Seen] = []
    while not (found := step(start, seen, MOST_CORES)).settled:
        seen.append(Seen(found.cores, speed(found.cores)))
        assert len(seen) <= PROBES + 1
    return found.cores, speed(found.cores) / max(speeds.values()), len(seen) - 1


def settled(step: Step, past: Callable[[str], Sequence[PastJob]]) -> Mapping[str, tuple[int, float, int]]:
    """Model → as `settle`; `past`: what its owner ran before."""
    found = {}
    for model, speeds in core_speeds().items():
        start = n_start(CATEGORY[model], (), past(model), MOST_CORES)
        assert start is not None
        found[model] = settle(step, start.cores, speeds)
    return found


def probes() -> Iterator[PaperTable]:
    counts, speeds = [], []
    for label, step in STEPS.items():
        found = settled(step, lambda _: ())
        counts.append(
            Row(
                f"{label}: most",
                max(count for *_, count in found.values()),
                PROBES,
                reach=PROBES,
                better="lower",
            )
        )
        speeds.append(Row(f"{label}: mean over models", 100 * fmean(share for _, share, _ in found.values())))
        speeds.append(Row(f"{label}: worst model", 100 * min(share for _, share, _ in found.values())))
    yield PaperTable("coda-probes", "CODA: probes until a first job's cores are found", "probes", counts)
    yield PaperTable("coda-probes-speed", "CODA: speed with the cores found, of the best", "%", speeds)


def together() -> PaperTable:
    """Of each job its speed beside the others, of its own alone, by the cycle of their group."""
    with (DATA / "muri/stage_profiles.csv").open() as file:
        profiles = {row["model"]: row for row in csv.DictReader(file) if row["num_gpu"] == "16"}
    alone_s = [muri_reference.SLOWER * float(profiles[model]["iteration_ms"]) / 1_000 for model in TOGETHER]
    stages = [
        (
            float(profiles[model]["storage_cpu_ms"]) / 1_000,
            float(profiles[model]["gpu_ms"]) / 1_000,
            float(profiles[model]["network_ms"]) / 1_000,
        )
        for model in TOGETHER
    ]
    cycle_s = muri_reference.period(stages) * muri_reference.GROUP_FACTORS[len(stages)]
    rows = [
        Row(model, one / cycle_s, published)
        for model, one, published in zip(TOGETHER, alone_s, (0.86, 0.48, 0.41, 0.25), strict=True)
    ]
    rows.append(Row("all together", sum(alone_s) / cycle_s, TABLE_2, reach=REACH * TABLE_2))
    return PaperTable(
        "muri-together",
        "Muri table 2: four jobs in turns on 16 GPUs, by their stage profiles",
        "of the speed alone",
        rows,
    )


def tables() -> Iterator[PaperTable]:
    yield resources()
    yield latencies()
    yield from probes()
    yield together()


if __name__ == "__main__":
    main("tests.papers.prediction.prediction_tables", tables)
