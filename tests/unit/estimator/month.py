"""A month of a small cell as a ledger: people, their networks, estimates by the estimator's own tiers, and
what was used.

Ada and Bob run the same few commands again and again; Eve sweeps batch sizes; Dan asks for whole cards and
uses little; a newcomer appears each week. After two thirds a library is updated, and memory grows by a third.

`python -m tests.unit.estimator.month JOBS FILE` writes it down, for `penstock estimator report --ledger
FILE`.
"""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.inputs.external_events import StepsMeasured, TaskExited, TaskPhaseChanged
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Usage
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resource_model.training import RESOURCES
from penstock_services.estimator.core.resources.estimate import HistoryTier, estimate
from penstock_services.estimator.core.resources.nearest import NearestTier
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import STEPS
from tests.support.cluster.driver import CellDriver, node_spec

DAY_MS, LAUNCH_MS = 86_400_000, 20_000
START_MS = 1_780_000_000_000
FIRST_TRAINING, NEXT_TRAINING = 60, 1.5


class Network(NamedTuple):
    """What a network really needs."""

    fixed_mib: float
    mib_per_sample: float
    busy_percent: float
    step_ms: float
    cores: float


NETWORKS = {
    "resnet50": Network(1_400, 78, 82, 60, 5.5),
    "bert": Network(2_600, 190, 93, 140, 2.2),
    "vgg16": Network(2_000, 120, 88, 95, 4.1),
    "lstm": Network(700, 14, 41, 22, 1.6),
    "recommender": Network(3_800, 2.5, 24, 9, 7.8),
}
OWNERS = ("ada", "bob", "eve", "dan")


def jobs(count: int, rng: np.random.Generator) -> Iterator[JobSpec]:
    names = list(NETWORKS)
    for number in range(count):
        owner = OWNERS[int(rng.integers(4))] if rng.random() > 0.1 else f"guest-{number * 4 // count}"
        name = names[int(rng.integers(len(names)))]
        batch = int(2 ** rng.integers(3, 7))
        if owner == "eve":
            batch = int(rng.integers(4, 70))
        asked = ResourceRequest()
        if owner == "dan":
            asked = ResourceRequest(gpu_memory_mib=30_000, cores=16, gpus=1)
        iterations = int(rng.choice([2_000, 5_000, 20_000]))
        yield JobSpec(
            owner=owner,
            command=("python", f"{name}.py", f"--steps={iterations}"),
            model=name,
            batch_size=batch,
            iterations=iterations,
            resources=asked,
        )


def month(count: int, seed: int = 0) -> CellDriver:
    """A cell after `count` finished jobs, spread over 30 days; `values` are its ledger's records."""
    rng = np.random.default_rng(seed)
    cell = CellDriver()
    cell.now_ms = START_MS
    cell.join(node_spec("node-1", 8, model="V100", memory_mib=32_510, cores=96))
    cell.join(node_spec("node-2", 8, model="A100", memory_mib=40_536, cores=96))
    known = State(Topic.JOBS, 0)
    runs = known.finished
    model, steps = ModelTier(known.nodes), StepTier(known.history, known.nearest, known.nodes)
    trained_on, current, current_steps = 0, None, None
    folded = 0
    for number, spec in enumerate(jobs(count, rng)):
        for value in cell.values[folded:]:
            known.fold(value)
        folded = len(cell.values)
        if len(runs) >= max(FIRST_TRAINING, NEXT_TRAINING * trained_on):
            trained_on = len(runs)
            trained = RESOURCES.train(runs, current)
            if trained is not None and trained.promoted:
                learned = RESOURCES.read(trained.body, trained.sha256)
                model.use(learned)
                current = learned.model
            stepped = STEPS.train(runs, current_steps)
            if stepped is not None and stepped.promoted:
                stepping = STEPS.read(stepped.body, stepped.sha256)
                steps.use(stepping)
                current_steps = stepping.model
        tiers = (HistoryTier(known.history), steps, model, NearestTier(known.nearest))
        cell.now_ms += int(30 * DAY_MS / count * rng.uniform(0.2, 1.0))
        cell.submit(f"job-{number:04}", spec, estimate(spec, tiers))
        run(cell, f"job-{number:04}", spec, rng, grown=1.33 if number > 0.66 * count else 1.0)
    return cell


def run(cell: CellDriver, job_id: str, spec: JobSpec, rng: np.random.Generator, grown: float) -> None:
    """Starts, tells its steps, is told its remaining time half-way, ends."""
    truth = NETWORKS[spec.model or ""]
    assert spec.batch_size is not None
    assert spec.iterations is not None
    cell.start(job_id)
    step_ms = truth.step_ms * (0.3 + 0.7 * spec.batch_size / 32) * math.exp(rng.normal(0, 0.08))
    run_ms = int(LAUNCH_MS + step_ms * spec.iterations)
    started_ms, job = cell.now_ms, cell.job(job_id)
    [worker] = job.tasks
    node_id = job.tasks[worker].place.node_id
    for phase, at_ms in (("launch", 0), ("train", LAUNCH_MS)):
        cell.feed(
            TaskPhaseChanged(
                node_id=node_id, task_id=worker, token=job.token, phase=phase, at_ms=started_ms + at_ms
            )
        )
    for part in (0.1, 0.3, 0.5, 1.0):
        cell.now_ms = started_ms + int(part * run_ms)
        done = int(part * spec.iterations)
        cell.feed(
            StepsMeasured(
                node_id=node_id,
                task_id=worker,
                token=job.token,
                at_ms=cell.now_ms,
                done=done,
                total=spec.iterations,
                steps=done // 2,
                step_ms=step_ms,
            )
        )
        if part == 0.5:
            cell.feed(
                remaining(job_id, cell.now_ms, run_ms / 2 * math.exp(rng.normal(0, 0.06)), done, step_ms)
            )
    memory = (
        grown * (truth.fixed_mib + truth.mib_per_sample * spec.batch_size) * math.exp(rng.normal(0, 0.03))
    )
    cores = truth.cores * math.exp(rng.normal(0, 0.1))
    cell.feed(
        TaskExited(
            node_id=node_id,
            task_id=worker,
            token=job.token,
            cause="exited",
            exit_code=0,
            started_ms=started_ms,
            exited_ms=cell.now_ms,
            usage=Usage(
                gpu_memory_mib=int(memory),
                host_memory_mib=int(1_500 * math.exp(rng.normal(0, 0.2))),
                cpu_ms=int(min(cores, len(job.tasks[worker].place.cores)) * run_ms),
                gpu_utilisation_percent=min(100.0, max(1.0, rng.normal(truth.busy_percent, 4))),
                gpu_utilisation_std=float(abs(rng.normal(6, 1))),
            ),
        )
    )


def remaining(job_id: str, now_ms: int, left_ms: float, done: int, step_ms: float) -> EtaEstimated:
    """With a tenth to either side; `done` is the half."""
    return EtaEstimated(
        job_id=job_id,
        attempt=1,
        at_ms=now_ms,
        done=done,
        left_ms=Bounds(middle=left_ms, low=left_ms * 0.9, high=left_ms * 1.11),
        steps=Bounds(middle=done, low=done, high=done),
        step_ms=Bounds(middle=step_ms, low=0.9 * step_ms, high=1.1 * step_ms),
        level=0.9,
        source="iterations asked for",
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(b"\n".join(month(int(sys.argv[1])).values) + b"\n")
