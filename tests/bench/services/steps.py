"""What step times and remaining times cost: a training on 10,000 runs, run times of a read's jobs, one
remaining time.

In this process, by the processor's time alone: the service trains in a worker, and does the rest on its loop.
"""

from dataclasses import dataclass, field
from math import exp, log
from time import process_time, thread_time

import msgspec
import numpy as np

from penstock.ledger.record.record import GENESIS, Draft, write
from penstock.model.decisions.ledger_events import PlacementDecided, TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, StepsMeasured, TaskStarted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.schema.validation import checked
from penstock_services.estimator.core.eta_updates import EtaUpdates
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.history import History, Run, key_of
from penstock_services.estimator.core.records.runs import Allocation, Card, FinishedRun, Steps, job_info
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.core.resources.nearest import Nearest
from penstock_services.estimator.core.step_time.run_time import StepTier
from penstock_services.estimator.core.step_time.training import STEPS, Durations
from tests.support.cluster.driver import node_spec

NETWORKS, OWNERS = 30, 20
CARDS = {"T4": 3.0, "V100": 1.5, "A100": 1.0}
RINGS = [(gpus,) * nodes for nodes in (1, 2, 3, 4, 6, 8) for gpus in (1, 2, 4, 8)]
CURVE_POINTS, WINDOWS = 40, 20
NODES = 1_000
RUNNING = 100  # jobs that report their steps
SEED = 7


@dataclass(slots=True)
class Found:
    """Of the processor."""

    training_s: float = 0.0
    reading_ms: float = 0.0
    one_ms: list[float] = field(default_factory=list)
    """One run time that nothing was prepared for."""
    at_once_ms: list[float] = field(default_factory=list)
    """Run times of so many different jobs of one read."""
    eta_ms: list[float] = field(default_factory=list)


def measure(runs: int, at_once: int, repeats: int) -> Found:
    """`runs`: finished ones; `at_once`: jobs in one read."""
    found, rng = Found(), np.random.default_rng(SEED)
    month = [_run(seq, rng) for seq in range(1, runs + 1)]
    began_s = process_time()
    trained = STEPS.train(month, None)
    found.training_s = process_time() - began_s
    assert trained is not None, "so few runs teach nothing"
    began_s = process_time()
    learned = STEPS.read(trained.body, trained.sha256)
    found.reading_ms = 1_000 * (process_time() - began_s)
    for _ in range(repeats):
        _ask(found, learned, at_once, rng)
    _report_steps(found, learned, rng)
    return found


def _run(seq: int, rng: np.random.Generator) -> FinishedRun:
    network, owner = int(rng.zipf(1.3)) % NETWORKS, int(rng.integers(OWNERS))
    ring, batch = RINGS[int(rng.integers(len(RINGS)))], int(2 ** rng.integers(3, 12))
    card = list(CARDS)[int(rng.integers(len(CARDS)))]
    gpus, iterations = sum(ring), int(10 ** rng.uniform(2, 4))
    step_s = CARDS[card] * (0.02 + 0.01 * network + 0.002 * (1 + network % 7) * batch / gpus)
    step_s += 0.0 if gpus == 1 else 0.03 * log(1 + gpus) * len(ring) ** 0.5
    step_ms = 1_000 * step_s * exp(rng.normal(0, 0.03))
    spec = JobSpec(owner=f"owner-{owner}", command=("train",), model=f"net-{network}", batch_size=batch)
    places = np.unique(np.geomspace(1, iterations, CURVE_POINTS).astype(int))
    curve = tuple((float(step), 1 + 4 * step**-0.5 * exp(rng.normal(0, 0.02))) for step in places)
    measured = Run(
        ended_ms=1_000 * seq,
        seq=seq,
        run_ms=iterations * step_ms,
        gpus=ring[0],
        total_gpus=gpus,
        iterations=iterations,
        step_ms=step_ms,
    )
    windows = tuple(step_ms * exp(rng.normal(0, 0.05)) for _ in range(WINDOWS))
    given = Allocation(ring[0], 1_000, 4, Card(card, 16_384))
    return FinishedRun(
        seq, f"job-{seq}", job_info(spec), given, None, measured, "", Steps(ring, windows, curve)
    )


def _spec(rng: np.random.Generator) -> JobSpec:
    """Hardly two are alike."""
    return JobSpec(
        owner=f"owner-{rng.integers(OWNERS)}",
        command=("train",),
        model=f"net-{rng.integers(8)}",
        batch_size=int(rng.integers(8, 2_000)),
        iterations=int(rng.integers(100, 100_000)),
        workers=int(rng.integers(1, 5)),
        resources=ResourceRequest(gpus=int(2 ** rng.integers(4))),
    )


def _ask(found: Found, learned: InUse[Durations], at_once: int, rng: np.random.Generator) -> None:
    nodes = NodeCapacity()
    for number in range(NODES):
        nodes.put(node_spec(f"node-{number}", 8, model=list(CARDS)[number % len(CARDS)]))
    tier = StepTier(History(), Nearest(), nodes)
    tier.use(learned)
    specs = [(spec, key_of(spec)) for spec in (_spec(rng) for _ in range(at_once))]
    for spec, key in specs:
        began_s = thread_time()
        tier.guess(spec, key)
        found.one_ms.append(1_000 * (thread_time() - began_s))
    tier.use(learned)  # it forgets what it was asked
    began_s = thread_time()
    tier.prepare([spec for spec, _ in specs])
    answers = [tier.guess(spec, key) for spec, key in specs]
    found.at_once_ms.append(1_000 * (thread_time() - began_s))
    assert any(answers), "the model knew nothing of any job"


def _report_steps(found: Found, learned: InUse[Durations], rng: np.random.Generator) -> None:
    """RUNNING jobs report their steps and losses at growing distances; an ETA is computed for every
    report."""
    ledger, head, now_ms = State(Topic.JOBS, 0), GENESIS, 0
    tier = StepTier(ledger.history, ledger.nearest, ledger.nodes)
    tier.use(learned)
    etas = EtaUpdates(ledger, tier)

    def record(*facts: Event, term: int | None = None) -> None:
        nonlocal head
        draft = Draft(term or head.term, now_ms, {"timer_id": "t"}, "committed", None, facts)
        head, value = write(head, draft)
        ledger.fold(value)

    record(TermStarted(term=1, placer_id="placer", settings=PlacerSettings()), term=1)
    record(NodeJoined(node=node_spec("node", 8, model="T4", memory_mib=16_384)))
    for number in range(RUNNING):
        spec = msgspec.structs.replace(_spec(rng), workers=1, target_loss=0.5)
        place = TaskPlacement(task_id=f"{number}/1/0", role="worker", rank=0, node_id="node", gpus=(0, 1))
        record(
            JobSubmitted(job_id=str(number), spec=spec),
            JobEstimated(job_id=str(number), estimate=estimate(spec, ())),
            PlacementDecided(job_id=str(number), attempt=1, tasks=(place,)),
            TaskStarted(node_id="node", task_id=place.task_id, token=1, pid=1, started_ms=0),
        )
    done = 1
    while done < 100_000:
        then = done + 1 + done // 10
        now_ms += 1_000
        for number in range(RUNNING):
            report = {"done": then, "steps": then - done, "step_ms": 0.01, "loss": 1 + 4 * then**-0.5}
            task = {"node_id": "node", "task_id": f"{number}/1/0", "token": 1, "at_ms": now_ms}
            record(checked(StepsMeasured, {**report, **task}))
            began_s = thread_time()
            etas.next(str(number))
            found.eta_ms.append(1_000 * (thread_time() - began_s))
        done = then
