"""Muri's 48 measured stage profiles: sampled as a node would see them, they are found again."""

import csv

import numpy as np
import pytest

from penstock.model.inputs.external_events import StageSample, StagesMeasured
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.validation import checked
from penstock_services.estimator.core.records.runs import job_info
from penstock_services.estimator.core.stages.profile import Sample, StageKey, stage_profile
from penstock_services.estimator.core.stages.registry import StageRegistry
from tests.support.data import DATA_ROOT

FILE = DATA_ROOT / "muri/stage_profiles.csv"
ITERATIONS = 20
SAMPLE_MS = 1.0
PEAKS = (900.0, 40.0, 100.0, 2_000.0)  # MB/s, cores, %, MB/s: of this made-up node
HUM = 0.04  # of each peak: what the resources that are not in turn still do
LEAST = (90.0, 4.0, 10.0, 200.0)  # a tenth of what the node can do

pytestmark = pytest.mark.skipif(
    not FILE.is_file(),
    reason=f"Muri's profiles are not {FILE}; set PENSTOCK_DATA to the folder that holds muri/",
)


def rows() -> list[tuple[str, float, tuple[float, float, float]]]:
    """(model and GPUs, iteration, (storage and CPU, GPU, network)), ms."""
    with FILE.open() as file:
        return [
            (
                f"{row['model']} on {row['num_gpu']}",
                float(row["iteration_ms"]),
                (float(row["storage_cpu_ms"]), float(row["gpu_ms"]), float(row["network_ms"])),
            )
            for row in csv.DictReader(file)
        ]


def sampled(iteration_ms: float, stages_ms: tuple[float, ...], overlapped_ms: float = 0.0) -> list[Sample]:
    """Iterations one after the other; each stage starts `overlapped_ms` before the one before it ends."""
    spans, at = [], 0.0
    for resource, lasted in zip((0, 2, 3), stages_ms, strict=True):
        spans.append((resource, max(0.0, at), max(0.0, at) + lasted))
        at += lasted - overlapped_ms
    samples = []
    for step in range(round(iteration_ms * ITERATIONS / SAMPLE_MS)):
        now = (step + 0.5) * SAMPLE_MS % iteration_ms
        usage = [HUM * peak for peak in PEAKS]
        for resource, begin, end in spans:
            if begin <= now < end:
                usage[resource] = PEAKS[resource]
        samples.append(Sample(SAMPLE_MS, (usage[0], usage[1], usage[2], usage[3])))
    return samples


def test_stages_in_turn_are_found_to_the_sample() -> None:
    """Those of the 48 whose stages fit into the iteration one after the other, sampled each millisecond."""
    fitting = [row for row in rows() if sum(row[2]) <= row[1]]
    assert len(fitting) >= 25
    for name, iteration_ms, stages_ms in fitting:
        found = stage_profile(sampled(iteration_ms, stages_ms), ITERATIONS, least=LEAST)
        assert (found.storage_ms, found.gpu_ms, found.network_ms) == pytest.approx(
            stages_ms, abs=SAMPLE_MS
        ), name
        assert found.iteration_ms == pytest.approx(iteration_ms, abs=0.1), name


def test_overlapping_stages_share_the_iteration() -> None:
    """The others overlap: no instant is counted twice, so that stages of one job never exceed its
    iteration."""
    overlapping = [row for row in rows() if sum(row[2]) > row[1]]
    assert overlapping
    for name, iteration_ms, stages_ms in overlapping:
        excess = (sum(stages_ms) - iteration_ms) / max(1, sum(value > 0 for value in stages_ms) - 1)
        found = stage_profile(sampled(iteration_ms, stages_ms, excess), ITERATIONS, least=LEAST)
        assert sum(found[:4]) + found.idle_ms == pytest.approx(found.iteration_ms), name
        first = min(stages_ms[0], iteration_ms)
        assert found.storage_ms == pytest.approx(first, abs=SAMPLE_MS), name


def test_the_papers_rule_alone_takes_hum_for_a_stage() -> None:
    """GPT-2 reads 0.6 ms of 426 from storage, less than a sample: hum is that resource's peak. Hence
    `least`."""
    name, iteration_ms, stages_ms = next(row for row in rows() if row[0] == "gpt2 on 1")
    samples = sampled(iteration_ms, (0.0, *stages_ms[1:]))
    assert stage_profile(samples, ITERATIONS).storage_ms == pytest.approx(iteration_ms), name
    assert stage_profile(samples, ITERATIONS, least=LEAST).gpu_ms == pytest.approx(
        stages_ms[1], abs=SAMPLE_MS
    )


def test_shared_profiles_stand_noise_and_one_liar() -> None:
    """All 48 as the service shares them: five owners measure with the noise that the paper calls usual (Muri
    Fig. 14: up to 0.2 per stage, which costs under 1 % of JCT), one of them reports a hundredfold; the median
    stays within the noise."""
    rng = np.random.default_rng(0)
    log, actual = StageRegistry(), {}
    for name, _, (storage_ms, gpu_ms, network_ms) in rows():
        model, _, gpus = name.partition(" on ")
        stages = {"storage": storage_ms, "gpu": gpu_ms, "network": network_ms}
        key = StageKey(model, 64, int(gpus))
        actual[key] = stages
        for owner in ("mallory", "ada", "bob", "eve", "zoe"):
            wrong = 100.0 if owner == "mallory" else 1.0
            samples = tuple(
                checked(
                    StageSample,
                    {"lasted_ms": lasted * wrong * rng.uniform(0.8, 1.2) * ITERATIONS, resource: 1.0},
                )
                for resource, lasted in stages.items()
                if lasted > 0
            )
            fact = StagesMeasured(
                node_id="n", task_id="t", token=1, at_ms=0, iterations=ITERATIONS, samples=samples
            )
            job = job_info(JobSpec(owner=owner, command=("x",), model=model, batch_size=64))
            assert log.measured(job, key.gpus, 1_000, fact) is not None, name
    news = list(log.news())
    assert len(news) == len(actual) == 48
    off = []
    for one, _ in news:
        key = StageKey(one.model, one.batch_size, one.gpus)
        found = {"storage": one.storage_ms, "gpu": one.gpu_ms, "network": one.network_ms}
        off += [found[resource] / lasted - 1 for resource, lasted in actual[key].items() if lasted > 0]
    assert max(map(abs, off)) <= 0.2
    assert np.mean(np.abs(off)) < 0.1
