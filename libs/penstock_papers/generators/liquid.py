"""`liquid/batch-<nodes>` and `liquid/immediate`: the jobs of Liquid's launchers (TPDS '22, §7.4).

Each job has one parameter server and two workers, each task with one GPU; 4 · U{1…8} samples per worker and
50 · U{4…20} iterations. A batch is 4 ResNet-50, 2 Inception V3 and 2 VGG-16 per 5 nodes of 2 GPUs, all
submitted at once, in a seeded order. Immediate: one job at a time, each long after the previous one has
ended.

Stage times are measured, but not for these jobs on these machines. Each iteration has a part that always
counts and a part that counts only across nodes (job model `stages`):
- ResNet-50: Pollux's `imagenet` on T4, two GPUs on one node and on two, at the worker's batch;
- Inception V3: as ResNet-50, a stand-in with as many parameters: no table has it;
- VGG-16: Muri's profile, 2 GPUs (one node) and 16 (two nodes), measured at batch 16 only, on V100.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.runtime.files.csv_import import Row
from penstock.simulator.generators.base import Family, Generator, rng_of, source
from penstock.simulator.job_models.measurements.measured import read_all, read_model
from penstock.simulator.job_models.measurements.placement_table import Model
from penstock.simulator.traces.jobs import Stages, TraceJob

BATCH: Mapping[str, int] = {"resnet-50": 4, "inception-v3": 2, "vgg-16": 2}
"""Jobs per 5 nodes."""
NODES = (5, 10, 15, 20)
WORKERS, PARAMETER_SERVERS = 2, 1
SAMPLES, MOST_SAMPLES = 4, 8
ITERATIONS, FEWEST_ITERATIONS, MOST_ITERATIONS = 50, 4, 20
IMMEDIATE_JOBS = 40
APART_S = 1_800.0  # longer than the longest job takes across nodes
ONE_NODE, TWO_NODES = (2,), (1, 1)
VGG, VGG_ONE_NODE, VGG_TWO_NODES = "vgg16", 2, 16
JOB_MODEL = "links(stages)"


def batch(nodes: int) -> Generator:
    """A batch on a multiple of 5 nodes."""

    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, f"liquid/batch-{nodes}")
        models = [model for model, count in BATCH.items() for _ in range(count * nodes // 5)]
        order = rng.permutation(len(models)).tolist()
        return _jobs(rng, [models[index] for index in order], [0.0] * len(models))

    jobs = sum(BATCH.values()) * nodes // 5
    return Generator(
        f"Liquid's batch run: {jobs} jobs with a parameter server and two workers, all at once",
        f"{nodes}x2@T4",
        JOB_MODEL,
        make,
    )


def immediate() -> Generator:
    def make(seed: int) -> Sequence[TraceJob]:
        rng = rng_of(seed, "liquid/immediate")
        kinds = [model for model, count in BATCH.items() for _ in range(count)]
        models = [kinds[int(rng.integers(len(kinds)))] for _ in range(IMMEDIATE_JOBS)]
        return _jobs(rng, models, [APART_S * index for index in range(IMMEDIATE_JOBS)])

    return Generator(
        f"Liquid's immediate run: {IMMEDIATE_JOBS} jobs, one at a time", "5x2@T4", JOB_MODEL, make
    )


def _jobs(rng: np.random.Generator, models: Sequence[str], times: Sequence[float]) -> Sequence[TraceJob]:
    imagenet = read_model(source("liquid", "pollux/traces/imagenet"))
    vgg_ms = _vgg_ms()
    jobs: list[TraceJob] = []
    for index, (model, submit_s) in enumerate(zip(models, times, strict=True)):
        samples = SAMPLES * int(rng.integers(1, MOST_SAMPLES + 1))
        iterations = ITERATIONS * int(rng.integers(FEWEST_ITERATIONS, MOST_ITERATIONS + 1))
        near_ms, far_ms = vgg_ms if model == "vgg-16" else _resnet_ms(imagenet, samples)
        jobs.append(
            TraceJob(
                job_id=f"liquid-{index}-{model}",
                submit_s=submit_s,
                duration_s=iterations * near_ms / 1_000,
                gpus=WORKERS,
                model=model,
                batch_size=WORKERS * samples,
                owner="liquid",
                iterations=iterations,
                stages=Stages(far_ms, 0.0, near_ms, max(0.0, far_ms - near_ms)),
                workers=WORKERS,
                parameter_servers=PARAMETER_SERVERS,
                server_gpus=1,
            )
        )
    return jobs


def _resnet_ms(imagenet: Model, samples: int) -> tuple[float, float]:
    """Time of an iteration on one node and on two; below the smallest measured batch as for that."""
    return imagenet.step(ONE_NODE, samples)[0] * 1_000, imagenet.step(TWO_NODES, samples)[0] * 1_000


def _vgg_ms() -> tuple[float, float]:
    """Time of an iteration on one node and on two."""

    def read(row: Row) -> tuple[str, int, float]:
        return row.name("model"), row.whole("num_gpu", least=1), row.number("iteration_ms", above=0)

    path = source("liquid", "muri/stage_profiles.csv")
    found = {
        gpus: iteration_ms
        for model, gpus, iteration_ms in read_all(path, {"model", "num_gpu", "iteration_ms"}, read)
        if model == VGG
    }
    return found[VGG_ONE_NODE], found[VGG_TWO_NODES]


LIQUID = Family(
    {**{f"liquid/batch-{nodes}": batch(nodes) for nodes in NODES}, "liquid/immediate": immediate()}
)
