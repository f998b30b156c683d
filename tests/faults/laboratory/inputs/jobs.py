"""The jobs of a run: what their users asked for, how their programs behave, and the outcomes that are
right."""

from typing import NamedTuple

import numpy as np
from msgspec import structs

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, Isolation, LogServer, NodeSpec
from tests.support.cluster.extremes import at_its_ends

SUCCEEDED, FAILED, CANCELLED = "succeeded", "failed", "cancelled"
TIMED_OUT_RUNNING, TIMED_OUT_QUEUED, UNSCHEDULABLE = "timed_out_running", "timed_out_queued", "unschedulable"
MODELS = ("A", "B")
CONFIGURATIONS = ("config-0", "config-1", "config-2", "config-3")
CORES_PER_GPU = 4
SPARE_CORES = 4
MEMORY_PER_GPU_MIB = 16_384
GPU_MEMORY_MIB = 16_384
CAPPING = Isolation(exits="pid_namespace", files=True, bandwidth="resctrl")
CAPPING_TIME = Isolation(exits="pid_namespace", files=True, bandwidth="cpu_quota")
ISOLATION = (CAPPING, CAPPING_TIME, CAPPING, None)

EXTREMES_EVERY = 4
"""Runs of which one has jobs with numbers at the ends of their ranges."""
CLAIMS = frozenset(
    {
        *("batch_size", "global_batch_size", "iterations", "target_loss", "deadline_ms", "labels", "model"),
        *("priority", "category", "traits"),
    }
)
"""Fields of a job's spec that estimates and orders of the queue rest on."""

KINDS = {
    "good": (10, (SUCCEEDED,)),
    "flaky": (2, (SUCCEEDED,)),
    "bad": (2, (FAILED,)),
    "missing": (1, (FAILED,)),
    "hungry": (1, (FAILED,)),
    "hangs": (1, (TIMED_OUT_RUNNING,)),
    "impatient": (1, (SUCCEEDED, TIMED_OUT_QUEUED)),
    "huge": (1, (UNSCHEDULABLE,)),
}
"""Kind → (weight, outcomes that are right for it under any faults)."""


class SimulatedJob(NamedTuple):
    """One job: spec, behaviour, and what its user does. Seconds."""

    job_id: str
    spec: JobSpec
    kind: str
    submit_s: float
    duration_s: float
    fails: int
    """So many attempts of a flaky one fail."""
    stop_s: float
    """From SIGTERM to its end."""
    stubborn: bool
    """Takes no notice of SIGTERM."""
    polite: bool
    """Exits 0 on SIGTERM."""
    cancel_s: float | None
    says_save: bool = False
    """Its script reports the last phase, now and then too early."""

    @property
    def allowed(self) -> tuple[str, ...]:
        """Outcomes that are right under any faults."""
        right = KINDS[self.kind][1]
        return right if self.cancel_s is None else (*right, CANCELLED)


def nodes_of(rng: np.random.Generator, count: int) -> list[NodeSpec]:
    """Small machines of two GPU models; the first one has the most GPUs. Every other one can cap memory
    bandwidth, every fourth the time of cores."""
    specs: list[NodeSpec] = []
    for number in range(count):
        gpus = 4 if number == 0 else int(rng.choice([1, 2, 2, 4]))
        model = MODELS[int(rng.random() < 0.25)] if number else MODELS[0]
        name = f"n{number}"
        specs.append(
            NodeSpec(
                machine_id=f"machine-{number}",
                node_id=name,
                boot_id=f"{name}-b1",
                rack=f"rack-{number % 2}",
                cores=CORES_PER_GPU * gpus + SPARE_CORES,
                host_memory_mib=MEMORY_PER_GPU_MIB * (gpus + 1),
                logs=LogServer(port=8_743, key="0" * 16),
                isolation=ISOLATION[number % len(ISOLATION)],
                gpus=tuple(
                    Gpu(index=i, uuid=f"{name}-{i}", model=model, memory_mib=GPU_MEMORY_MIB)
                    for i in range(gpus)
                ),
            )
        )
    return specs


def jobs_of(
    rng: np.random.Generator,
    count: int,
    nodes: list[NodeSpec],
    span_s: float,
    *,
    saving: bool,
    early: bool,
    alike: bool,
) -> list[SimulatedJob]:
    """`saving`: every other one saves checkpoints; `early`: two of three launch before their GPUs are free;
    `alike`: three of four are one worker with a GPU, so that they may share it. Each fits the whole empty
    cell, but for the huge ones."""
    names = list(KINDS)
    weights = np.array([KINDS[name][0] for name in names], dtype=float)
    found: list[SimulatedJob] = []
    for number in range(count):
        kind = names[int(rng.choice(len(names), p=weights / weights.sum()))]
        duration_s = float(rng.uniform(1, 90))
        cancel_s = float(rng.uniform(0, 200)) if rng.random() < 0.12 and kind != "huge" else None
        found.append(
            SimulatedJob(
                job_id=f"j{number:02}",
                spec=structs.replace(
                    _spec(rng, number, kind, nodes, alike=alike and number % 4 > 0),
                    checkpoint="sdk" if saving and number % 2 == 0 else "none",
                    prelaunch=early and number % 3 > 0,
                ),
                kind=kind,
                submit_s=float(rng.uniform(0, span_s)) if rng.random() < 0.7 else 0.0,
                duration_s=duration_s,
                fails=int(rng.integers(1, 3)),
                stop_s=float(rng.uniform(0, 8)),
                stubborn=bool(rng.random() < 0.15),
                polite=bool(rng.random() < 0.1),
                cancel_s=cancel_s,
                says_save=early,
            )
        )
    return found


def at_extremes(seed: int, jobs: list[SimulatedJob]) -> list[SimulatedJob]:
    """Every other one claims something at an end of its range: nothing that changes where it fits, how long
    it runs or how it ends."""
    rng = np.random.default_rng([seed, 4])
    return [
        job._replace(
            spec=at_its_ends(JobSubmitted(job_id=job.job_id, spec=job.spec), rng, 4, within=CLAIMS).spec
        )
        if number % 2
        else job
        for number, job in enumerate(jobs)
    ]


def _spec(rng: np.random.Generator, number: int, kind: str, nodes: list[NodeSpec], *, alike: bool) -> JobSpec:
    workers, gpus, share, servers = (1, 1, None, 0) if alike else _shape(rng, nodes)
    if kind == "huge":
        workers, gpus, share, servers = 3 * len(nodes) + 1, 4, None, 0
    moldable = not servers and not alike and kind != "huge" and number % 3 == 2
    return JobSpec(
        min_workers=max(1, workers - 1) if moldable else None,
        global_batch_size=512 if moldable else None,
        name=f"j{number:02}",
        owner=f"u{number % 3}",
        companions="any",
        command=("train", CONFIGURATIONS[number % len(CONFIGURATIONS)]),
        workers=workers + 2 * moldable,
        parameter_servers=servers,
        resources=ResourceRequest(
            gpus=gpus if gpus != 1 or rng.random() < 0.7 or share is not None else None,
            cores=int(rng.integers(1, 3)) if rng.random() < 0.5 else None,
            host_memory_mib=int(rng.integers(256, 2_048)) if rng.random() < 0.5 else None,
            gpu_memory_mib=2_048 if share is not None or rng.random() < 0.3 else None,
            gpu_share_milli=share,
        ),
        gpu_models=(MODELS[0],) if rng.random() < 0.15 and gpus and workers * gpus <= 4 else (),
        retry=RetryPolicy(
            max_attempts=3 if kind == "flaky" else int(rng.integers(1, 4)),
            backoff_ms=int(rng.integers(0, 5_000)),
            backoff_max_ms=20_000,
        ),
        queue_timeout_ms=60_000 if kind == "impatient" else None,
        run_timeout_ms=30_000 if kind == "hangs" else None,
        grace_ms=int(rng.integers(0, 12_000)),
    )


def _shape(rng: np.random.Generator, nodes: list[NodeSpec]) -> tuple[int, int, int | None, int]:
    """(workers, GPUs each, share of one GPU or None, parameter servers)."""
    if rng.random() < 0.25:
        return int(rng.integers(1, 3)), 1, int(rng.choice([250, 300, 500, 600])), 0
    gpus = int(rng.choice([0, 1, 1, 1, 2, 2, 4]))
    room = sum(len(node.gpus) // gpus for node in nodes) if gpus else 4
    workers = min(room, int(rng.choice([1, 1, 1, 2, 2, 3, 4])))
    servers = 1 if workers > 1 and rng.random() < 0.3 else 0
    return workers, gpus, None, servers
