"""Simulations of CODA's cluster for `tests.papers.coda.coda_tables`: variants of policies, mixes of jobs, and
what is sampled of a run.

Jobs are those of `penstock_papers.generators.coda_month`, speeds those of Synergy's table with contention for
memory bandwidth. A training that moves saves in 2.5 s and launches in 20 s; a CPU job that is aborted begins
anew. The best number of cores is the fewest with 98 % of the best speed on a node: an oracle, which stands
for where CODA's search ends. Under profile `coda` the contention-guard searches nevertheless by CODA's walk
(at most four probes, which cost what they take), and slows CPU jobs that slow a training.

Figures are sampled each five minutes (of the month each twenty) from half a day on until the last arrival.

A *part* of the cluster is every fourth job of a day, and every fourth node: each node has the load of the
whole, and a burst of CPU jobs has the part of the cluster that it has of the whole.
"""

from collections.abc import Sequence
from functools import cache
from time import process_time
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.model.nouns.nodes import Isolation, NodeSpec
from penstock.model.nouns.settings import Contention
from penstock.model.nouns.types import Estimate
from penstock.simulator.commands.options import validate
from penstock.simulator.engine import Simulation
from penstock.simulator.generators.base import source
from penstock.simulator.job_models.catalogue import Run, work_for
from penstock.simulator.job_models.measurements.cores import Cpu
from penstock.simulator.job_models.measurements.tables import SENSITIVITY, read_sensitivity
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.sharing import BANDWIDTH_KNEE
from penstock.simulator.traces.files.importing import Trace
from penstock.simulator.traces.jobs import TraceJob
from penstock_papers.generators.coda_month import CORES_PER_NODE, make
from penstock_papers.profiles import CODA_CONTENTION as AS_IN_SOURCE
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import Floats
from tests.support.cli.command_line import simulate_options

PART, DAYS, MONTH = "coda/1-day", "coda/3-days", "coda/month"
EACH = 4
"""Of `PART`: every so many-th job and node."""
WARM_UP_S = 43_200.0
AT_ONCE_S = 1.0
TRAINING = RestartCost(2.5, 20.0, 0.0)
ABORTED = RestartCost(begins_anew=True)
WITH_MBA = Isolation(exits="pid_namespace", files=True, bandwidth="resctrl")
ENOUGH = 0.98
"""Of the best speed: the fewest cores with so much of it are the best number."""


class Outcome(NamedTuple):
    """Of one run; shares 0 – 1."""

    utilisation: float
    """Of the GPUs held."""
    while_queued: float
    """The same, while any job waits."""
    queued: float
    """Jobs that wait."""
    crowded: float
    """GPUs of trainings on nodes of which more than 75 % of the memory bandwidth is asked for, of those
    held."""
    by_cpu_jobs: float
    """What CPU jobs take of the memory bandwidth of nodes with trainings, of all that is taken there."""
    active: float
    """GPUs held, while jobs with GPUs wait."""
    allocated: float
    """GPUs held, always."""
    fragmented: float
    """GPUs free, no more than the jobs with GPUs that wait ask for together."""
    at_once: float
    """Of the jobs with GPUs."""
    over_10_min: float
    cpu_10_s: float
    cpu_3_min: float
    p99_gpu_user_s: float
    """The longest of the users' 99th percentiles of queueing, users 1 – 14."""
    p99_cpu_user_s: float
    aborts: float
    """Per CPU job."""
    moves: float
    """Per training."""
    more_cores: float
    """Share of the trainings that began with one to five cores more than they asked for."""
    fewer_cores: float
    """With one to twenty fewer."""
    cpu_s: float
    """Processor time of the run."""


NONE = Outcome(*[0.5] * len(Outcome._fields))


class Variant(NamedTuple):
    title: str
    profile: str
    best_cores: bool = False
    """Trainings get the best number of cores from the start; else what they ask for."""
    searches: bool = True
    """Under profile `coda`: the cores of running trainings are searched for."""
    eliminates: bool = True
    """Likewise: CPU jobs that slow a training are slowed."""
    caps: bool = False
    """Nodes can cap memory bandwidth (MBA); else the cores of who slows a training are halved."""

    @property
    def key(self) -> str:
        parts = ("-best" if self.best_cores else "-asked", "" if self.searches else "-arrays")
        return f"{self.profile}{''.join(parts)}{'' if self.eliminates or not self.searches else '-contended'}"

    @property
    def contention(self) -> Contention | None:
        """None: as the profile has it."""
        if self.searches and self.eliminates:
            return None
        search = AS_IN_SOURCE.search if self.searches else "none"
        return replace(AS_IN_SOURCE, search=search, eliminate=self.eliminates)


class Mix(NamedTuple):
    """What differs from the trace."""

    title: str
    high_demand: float | None = None
    """So many of the CPU jobs have a high demand for memory bandwidth, 0 – 1; None: as in the trace, 0.5
    %."""
    language_and_speech: bool = False
    """All trainings are of such models: §VI-A has most of them so."""


FIFO = Variant("FIFO", "fifo")
DRF = Variant("DRF", "drf")
CODA = Variant("CODA", "coda", best_cores=True)
WITH_CAPS = CODA._replace(title="CODA on nodes that can cap bandwidth", caps=True)
WITHOUT_ELIMINATOR = CODA._replace(title="CODA without the eliminator", eliminates=False)
ABLATIONS = (
    WITHOUT_ELIMINATOR,
    Variant("CODA, cores as asked for, then its walk", "coda"),
    Variant("arrays alone, cores as asked for", "coda", searches=False, eliminates=False),
    Variant("best cores alone, FIFO", "fifo", best_cores=True),
    Variant("best cores alone, DRF", "drf", best_cores=True),
)
AS_TRACED = Mix("0.5 % of the CPU jobs with high demand, all models")
CONTENDED = Mix("5 % with high demand, language and speech models only", 0.05, language_and_speech=True)
LANGUAGE_AND_SPEECH = ("bert", "deepspeech", "gnmt", "lstm", "m5", "transformer")


@cache
def cpu() -> Cpu:
    return Cpu(read_sensitivity(source("coda", "synergy") / SENSITIVITY))


@cache
def best(model: str, gpus: int) -> tuple[int, float]:
    """(fewest cores with nearly the best speed, the best speed) of a job that has a node."""
    speeds = {
        cores: cpu().relative(model, cores / gpus, gpus=gpus) for cores in range(gpus, CORES_PER_NODE + 1)
    }
    top = max(speeds.values())
    return next(cores for cores, speed in speeds.items() if speed >= ENOUGH * top), top


def with_best(job: TraceJob, estimate: Estimate) -> Estimate:
    """As CODA's allocator would settle; a training on one node."""
    if not job.gpus:
        return estimate
    return replace(estimate, worker=replace(estimate.worker, cores=best(job.model, job.gpus)[0]))


def cost_of(job: TraceJob) -> RestartCost:
    return TRAINING if job.gpus else ABORTED


def mixed(jobs: Sequence[TraceJob], mix: Mix, seed: int) -> Sequence[TraceJob]:
    """The trace's jobs; other numbers of the same seed choose whose demand or model is another one."""
    rng = np.random.default_rng((seed, 1))
    found = []
    for job in jobs:
        draw, demand, place = (
            rng.random(),
            float(rng.uniform(0.5, 1.0)),
            int(rng.integers(len(LANGUAGE_AND_SPEECH))),
        )
        if job.gpus and mix.language_and_speech:
            found.append(job._replace(model=LANGUAGE_AND_SPEECH[place]))
        elif not job.gpus and mix.high_demand is not None and draw < mix.high_demand:
            found.append(job._replace(memory_bandwidth=demand))
        else:
            found.append(job)
    return found


@cache
def workload(trace: str, seed: int) -> Trace:
    if trace != PART:
        return validate(simulate_options(trace)).trace(seed)
    return workload(DAYS, 0)._replace(jobs=make(seed, 1)[::EACH])


@simulated(NONE)
def run(trace: str, variant: Variant, seed: int, mix: Mix = AS_TRACED) -> Outcome:
    given = validate(simulate_options(DAYS if trace == PART else trace))
    nodes, jobs = given.cluster.under(seed), workload(trace, seed)
    nodes = nodes[::EACH] if trace == PART else nodes
    jobs = jobs._replace(jobs=mixed(jobs.jobs, mix, seed))
    settings = given.settings(variant.profile, seed)
    if variant.contention is not None:
        settings = replace(settings, contention=variant.contention)
    work = work_for(given.job_model, jobs, given.path, settings, Run(nodes=nodes, cost_of=cost_of))
    assert isinstance(work, RestartingWork)
    options = given.options._replace(predicts=with_best) if variant.best_cores else given.options
    if variant.caps:
        nodes = tuple(replace(node, isolation=WITH_MBA) for node in nodes)
    simulation = Simulation(nodes, settings, work, jobs.jobs, options)
    each_s = 1_200.0 if trace == MONTH else 300.0
    more = [
        (best(job.model, job.gpus)[0] if variant.best_cores else round(job.cores or 0))
        - round(job.cores or 0)
        for job in jobs.jobs
        if job.gpus
    ]
    meter = Samples(simulation, work, nodes, each_s, jobs.jobs[-1].submit_s, more)
    while meter.step():
        pass
    return meter.outcome()


class Sample(NamedTuple):
    """Of one moment."""

    busy: float
    """GPUs' utilisation, of all GPUs."""
    held: float
    """Of all GPUs."""
    trainings_wait: bool
    wanted: float
    """GPUs free that trainings which wait could use, of all."""
    queued: int
    crowded: float
    """GPUs of trainings on nodes over 75 % of their memory bandwidth, of all."""
    by_cpu_jobs: float
    """What CPU jobs take of the memory bandwidth of nodes with trainings, in nodes."""
    by_trainings: float


class Samples:
    """A run, sampled at equal times."""

    def __init__(
        self,
        simulation: Simulation,
        work: RestartingWork,
        nodes: Sequence[NodeSpec],
        each_s: float,
        until_s: float,
        more: Sequence[int],
    ) -> None:
        """`more`: of each training the cores that it gets beyond those it asks for."""
        self._simulation, self._work = simulation, work
        self._gpus = sum(len(node.gpus) for node in nodes)
        self._each_s, self._until_s = each_s, until_s
        self._next_s = WARM_UP_S
        self._rows: list[Sample] = []
        self._more = more
        self._began_s = process_time()

    def step(self) -> bool:
        """To the next moment; samples before it see what was since the last."""
        simulation = self._simulation
        at_s = simulation._next_s()
        while at_s is not None and self._next_s < min(at_s, self._until_s):
            self._rows.append(self._sample())
            self._next_s += self._each_s
        return simulation.step()

    def _sample(self) -> Sample:
        state, gpus = self._simulation.cell.state, self._gpus
        held = self._simulation.meter.held
        busy = 0.0
        trains: dict[str, float] = {}
        takes: dict[tuple[str, bool], float] = {}
        for job in state.holding.values():
            run = self._work._runs.get(job.job_id)
            if run is None or run.at.name != "TRAIN":
                continue
            for node_id, share in run.seen.traffic.items():
                key = node_id, run.job.gpus > 0
                takes[key] = takes.get(key, 0.0) + share
                trains[node_id] = trains.get(node_id, 0.0) + len(run.placement[node_id].gpus)
            if run.job.gpus:
                asked = cpu()._as_asked(run.job)
                busy += run.job.gpus * run.speed * asked / best(run.job.model, run.job.gpus)[1]
        waiting = state.arrays.large_gpus + state.arrays.small_gpus - held
        beside = {node_id: takes.get((node_id, False), 0.0) for node_id, count in trains.items() if count}
        own = {node_id: takes.get((node_id, True), 0.0) for node_id in beside}
        crowded = [node_id for node_id in beside if beside[node_id] + own[node_id] > BANDWIDTH_KNEE]
        return Sample(
            busy / gpus,
            held / gpus,
            waiting > 0,
            min(waiting, gpus - held) / gpus,
            len(state.queue),
            sum(trains[node_id] for node_id in crowded) / gpus,
            sum(beside.values()),
            sum(own.values()),
        )

    def outcome(self) -> Outcome:
        meter = self._simulation.meter
        figures = self._simulation.figures(0, 0)
        assert figures.unfinished_jobs == 0
        columns = zip(Sample._fields, np.array(self._rows, dtype=float).T, strict=True)
        all_of = SimpleNamespace(**dict(columns))
        held, waits_gpu, waits_any = all_of.held, all_of.trainings_wait > 0, all_of.queued > 0
        always = np.ones_like(waits_any)

        def of_held(amount: Floats, where: Floats = always) -> float:
            """At these moments; at all, where there is none such."""
            chosen = where if where.any() else always
            return float(amount[chosen].sum() / held[chosen].sum())

        waits: dict[bool, list[float]] = {True: [], False: []}
        of_user: dict[str, list[float]] = {}
        for life in meter.lives.values():
            assert life.first_start_s is not None
            wait_s = life.first_start_s - life.job.submit_s
            waits[life.job.gpus > 0].append(wait_s)
            of_user.setdefault(life.job.owner, []).append(wait_s)
        training, without = np.array(waits[True]), np.array(waits[False])
        p99 = {user: float(np.quantile(found, 0.99)) for user, found in of_user.items()}
        aborted = sum(life.starts - 1 for life in meter.lives.values() if not life.job.gpus)
        moved = sum(life.starts - 1 for life in meter.lives.values() if life.job.gpus)
        only_cpu = {user for user in p99 if int(user.removeprefix("user-")) > 14}
        return Outcome(
            utilisation=of_held(all_of.busy),
            while_queued=of_held(all_of.busy, waits_any),
            queued=float(all_of.queued.mean()),
            crowded=of_held(all_of.crowded),
            by_cpu_jobs=float(
                all_of.by_cpu_jobs.sum() / (all_of.by_cpu_jobs.sum() + all_of.by_trainings.sum())
            ),
            active=float(held[waits_gpu if waits_gpu.any() else always].mean()),
            allocated=float(held.mean()),
            fragmented=float(all_of.wanted.mean()),
            at_once=float((training <= AT_ONCE_S).mean()),
            over_10_min=float((training > 600.0).mean()),
            cpu_10_s=float((without <= 10.0).mean()),
            cpu_3_min=float((without <= 180.0).mean()),
            p99_gpu_user_s=max(found for user, found in p99.items() if user not in only_cpu),
            p99_cpu_user_s=max(found for user, found in p99.items() if user in only_cpu),
            aborts=aborted / len(without),
            moves=moved / len(training),
            more_cores=float(np.mean([1 <= more <= 5 for more in self._more])),
            fewer_cores=float(np.mean([-20 <= more <= -1 for more in self._more])),
            cpu_s=process_time() - self._began_s,
        )
