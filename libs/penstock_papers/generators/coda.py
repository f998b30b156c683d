"""`coda/default`: GPU and CPU jobs side by side on 80 nodes with 5 GPUs and 28 cores (CODA, HPCA '21, §VI).

4,000 GPU pods of openb without those larger than a node, and three times as many of its CPU pods, both
sampled with replacement: 75 % are CPU jobs, as in the source. A pod keeps its GPUs and its run time; parts of
GPUs count as whole ones (the source shares none). The rest is assumed:
- run times are cut to half a minute at least and two hours at most;
- arrivals are Poisson over the time in which the GPU jobs ask for 95 % of all GPUs;
- a GPU job's model is sampled evenly from Synergy's twelve; it asks for cores as in the source: 76.1 % for 1
  – 2 in all, 15.3 % for 11 – 20, the others for 3 – 10, evenly, and no job for less than one per GPU;
- a CPU job asks for the part of a node's 28 cores that its pod asks of 96; the run times of CPU jobs are
  scaled, all by one factor, so that all jobs together ask for 100 % of the cores;
- a CPU job takes 0.5 – 2 times as large a part of the memory bandwidth as of the cores; a GPU job 2 % per
  GPU;
- twenty users, of which 15 – 20 submit CPU jobs only.
"""

from collections.abc import Sequence

import numpy as np

from penstock.simulator.generators.base import Generator, rng_of, source
from penstock.simulator.job_models.sharing import SENSITIVITY
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.jobs import TraceJob

NODES, GPUS_PER_NODE, CORES_PER_NODE = 80, 5, 28
GPU_JOBS, CPU_JOBS_PER_GPU_JOB = 4_000, 3
SHORTEST_S, LONGEST_S = 30.0, 7_200.0
OF_GPUS, OF_CORES = 0.95, 1.0
CORES_OF_OPENB = 96  # of most of its nodes
MODELS = tuple(sorted(SENSITIVITY))
CORES, OF_JOBS = ((1, 2), (3, 10), (11, 20)), (0.761, 0.086, 0.153)
LEAST_TRAFFIC, MOST_TRAFFIC = 0.5, 2.0
GPU_TRAFFIC = 0.02
USERS, WITH_GPUS = 20, 14


def coda() -> Generator:
    return Generator(
        f"CODA's mix: {GPU_JOBS} GPU jobs and three times as many CPU jobs, cores and memory bandwidth short",
        f"{NODES}x{GPUS_PER_NODE}x{CORES_PER_NODE}",
        "bandwidth(cpu)",
        make,
    )


def make(seed: int) -> Sequence[TraceJob]:
    rng = rng_of(seed, "coda/default")
    pods = read_trace(source("coda", "openb/openb_pod_list_default.csv")).jobs
    ran = [pod for pod in pods if pod.duration_s > 0 and pod.gpus <= GPUS_PER_NODE]
    gpu_pods = _sampled(rng, [pod for pod in ran if pod.gpus], GPU_JOBS)
    cpu_pods = _sampled(rng, [pod for pod in ran if not pod.gpus], GPU_JOBS * CPU_JOBS_PER_GPU_JOB)
    with_gpus = [_gpu_job(rng, pod) for pod in gpu_pods]
    without = [_cpu_job(rng, pod) for pod in cpu_pods]
    span_s = sum(job.gpus * job.duration_s for job in with_gpus) / (OF_GPUS * NODES * GPUS_PER_NODE)
    left_s = OF_CORES * span_s * NODES * CORES_PER_NODE - _core_seconds(with_gpus)
    factor = left_s / _core_seconds(without)
    jobs = with_gpus + [job._replace(duration_s=max(1.0, job.duration_s * factor)) for job in without]
    times = sorted(rng.uniform(0.0, span_s, len(jobs)).tolist())
    order = rng.permutation(len(jobs)).tolist()
    return [
        jobs[index]._replace(job_id=f"coda-{place}", submit_s=submit_s)
        for place, (index, submit_s) in enumerate(zip(order, times, strict=True))
    ]


def _sampled(rng: np.random.Generator, pods: Sequence[TraceJob], count: int) -> Sequence[TraceJob]:
    return [pods[index] for index in rng.integers(len(pods), size=count).tolist()]


def _core_seconds(jobs: Sequence[TraceJob]) -> float:
    return sum((job.cores or 0.0) * job.duration_s for job in jobs)


def _run_s(pod: TraceJob) -> float:
    return min(LONGEST_S, max(SHORTEST_S, pod.duration_s))


def _gpu_job(rng: np.random.Generator, pod: TraceJob) -> TraceJob:
    least, most = CORES[int(rng.choice(len(CORES), p=OF_JOBS))]
    cores = max(pod.gpus, int(rng.integers(least, most + 1)))
    return TraceJob(
        job_id="",
        submit_s=0.0,
        duration_s=_run_s(pod),
        gpus=pod.gpus,
        model=MODELS[int(rng.integers(len(MODELS)))],
        owner=f"user-{1 + int(rng.integers(WITH_GPUS))}",
        cores=cores,
        memory_bandwidth=GPU_TRAFFIC * pod.gpus,
    )


def _cpu_job(rng: np.random.Generator, pod: TraceJob) -> TraceJob:
    cores = min(CORES_PER_NODE, max(1, round((pod.cores or 1.0) * CORES_PER_NODE / CORES_OF_OPENB)))
    traffic = float(rng.uniform(LEAST_TRAFFIC, MOST_TRAFFIC)) * cores / CORES_PER_NODE
    return TraceJob(
        job_id="",
        submit_s=0.0,
        duration_s=_run_s(pod),
        gpus=0,
        owner=f"user-{1 + int(rng.integers(USERS))}",
        cores=cores,
        memory_bandwidth=min(1.0, traffic),
    )
