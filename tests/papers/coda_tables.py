"""CODA's cluster through the real engine, beside §VI: `python -m tests.papers.coda_tables`.

Jobs are those of `penstock.simulator.generators.coda_month`, speeds those of Synergy's table with contention for memory bandwidth. A training that moves saves in 2.5 s and launches in
20 s; a CPU job that is aborted begins anew. The best number of cores is the fewest with 98 % of the best speed on a node: what CODA's allocator finds if its probes lead there, and cost nothing.

The utilisation of a GPU is the speed of its training relative to the best cores, mean over the GPUs held (§III-A1: rates of use are averages across active GPUs). The published one is
that of the hardware, which is below 1 at its best: only the ratio between policies compares. Figures are sampled each five minutes (of the month each twenty) from half a day on until the
last arrival. Intervals: 95 % over seeds, resampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from statistics import fmean
from time import process_time
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from penstock.model.types import Estimate
from penstock.simulator.commands.options import judge
from penstock.simulator.engine import Simulation
from penstock.simulator.generators.base import source
from penstock.simulator.generators.coda import CORES_PER_NODE, GPUS_PER_NODE, NODES
from penstock.simulator.job_models.catalogue import Run, work_for
from penstock.simulator.job_models.cores import Cpu
from penstock.simulator.job_models.restarts import RestartCost, RestartingWork
from penstock.simulator.job_models.tables import SENSITIVITY, read_sensitivity
from penstock.simulator.traces.jobs import TraceJob
from tests.papers.parallel_runs import simulated
from tests.papers.resampling import mean
from tests.papers.tables import PaperTable, Row, main
from tests.support.command_line import simulate_options

SEEDS, QUICK_SEEDS = 8, 4
DAYS, MONTH = "coda/3-days", "coda/month"
WARM_UP_S = 43_200.0
AT_ONCE_S = 1.0
TRAINING = RestartCost(2.5, 20.0, 0.0)
ABORTED = RestartCost(begins_anew=True)
ENOUGH = 0.98
"""Of the best speed: the fewest cores with so much of it are the best number."""


class Outcome(NamedTuple):
    """Of one run; shares 0 – 1."""

    utilisation: float
    """Of the GPUs held."""
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


FIFO = Variant("FIFO", "fifo")
DRF = Variant("DRF", "drf")
CODA = Variant("CODA", "coda", best_cores=True)
ABLATIONS = (
    Variant("arrays alone, cores as asked for", "coda"),
    Variant("best cores alone, FIFO", "fifo", best_cores=True),
    Variant("best cores alone, DRF", "drf", best_cores=True),
)


class Published(NamedTuple):
    """In percent; None: not published. Source: CODA §VI."""

    utilisation: float | None = None
    active: float | None = None
    fragmented: float | None = None
    at_once: float | None = None
    over_10_min: float | None = None
    cpu_10_s: float | None = None
    cpu_3_min: float | None = None
    more_cores: float | None = None
    fewer_cores: float | None = None


PUBLISHED: Mapping[Variant, Published] = {
    FIFO: Published(45.4, 83.5, 14.3, over_10_min=43.1, cpu_10_s=87.4),
    DRF: Published(44.7, 83.3, 14.6, over_10_min=28.9, cpu_10_s=87.8),
    CODA: Published(62.1, 91.2, 1.0, at_once=92.1, cpu_3_min=94.5, more_cores=57.1, fewer_cores=33.6),
}
LABELS: Mapping[str, str] = {
    "utilisation": "speed on GPUs held, of the best (published: their utilisation)",
    "active": "GPUs held while trainings wait",
    "allocated": "GPUs held",
    "fragmented": "GPUs free that waiting trainings could use",
    "at_once": "trainings that start at once",
    "over_10_min": "trainings that wait more than 10 min",
    "cpu_10_s": "CPU jobs that start within 10 s",
    "cpu_3_min": "CPU jobs that start within 3 min",
    "aborts": "CPU jobs aborted, per CPU job",
    "moves": "trainings moved, per training",
    "more_cores": "trainings with 1 to 5 cores more than asked for",
    "fewer_cores": "trainings with 1 to 20 cores fewer",
}
REACH: Mapping[str, tuple[float, str]] = {
    "fragmented": (1.0, "lower"),
    "at_once": (92.1, "higher"),
    "cpu_3_min": (94.5, "higher"),
}
"""What CODA has to reach here, in percent."""
MONTH_CPU_S = 300.0


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


@simulated(NONE)
def run(trace: str, variant: Variant, seed: int) -> Outcome:
    given = judge(simulate_options(trace))
    jobs = given.trace(seed)
    settings = given.settings(variant.profile, seed)
    work = work_for(given.job_model, jobs, given.path, settings, Run(nodes=given.nodes, cost_of=cost_of))
    assert isinstance(work, RestartingWork)
    options = given.options._replace(predicts=with_best) if variant.best_cores else given.options
    simulation = Simulation(given.cluster.under(seed), settings, work, jobs.jobs, options)
    each_s = 300.0 if trace == DAYS else 1_200.0
    more = [
        (best(job.model, job.gpus)[0] if variant.best_cores else round(job.cores or 0))
        - round(job.cores or 0)
        for job in jobs.jobs
        if job.gpus
    ]
    meter = Samples(simulation, work, each_s, jobs.jobs[-1].submit_s, more)
    while meter.step():
        pass
    return meter.outcome()


class Samples:
    """A run, sampled at equal times."""

    def __init__(
        self,
        simulation: Simulation,
        work: RestartingWork,
        each_s: float,
        until_s: float,
        more: Sequence[int],
    ) -> None:
        """`more`: of each training the cores that it gets beyond those it asks for."""
        self._simulation, self._work = simulation, work
        self._each_s, self._until_s = each_s, until_s
        self._next_s = WARM_UP_S
        self._rows: list[tuple[float, float, bool, float]] = []
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

    def _sample(self) -> tuple[float, float, bool, float]:
        """(GPUs' utilisation, GPUs held, whether trainings wait, GPUs free that they could use), of all GPUs."""
        state, gpus = self._simulation.cell.state, NODES * GPUS_PER_NODE
        held = self._simulation.meter.held
        busy = 0.0
        for job in state.holding.values():
            run = self._work._runs.get(job.job_id)
            if run is not None and run.job.gpus and run.at.name == "TRAIN":
                asked = cpu()._as_asked(run.job)
                busy += run.job.gpus * run.speed * asked / best(run.job.model, run.job.gpus)[1]
        waiting = state.arrays.large_gpus + state.arrays.small_gpus - held
        return busy / gpus, held / gpus, waiting > 0, min(waiting, gpus - held) / gpus

    def outcome(self) -> Outcome:
        meter = self._simulation.meter
        figures = self._simulation.figures(0, 0)
        assert figures.unfinished_jobs == 0
        rows = np.array(self._rows, dtype=float)
        queued = rows[rows[:, 2] > 0]
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
            float(rows[:, 0].sum() / rows[:, 1].sum()),
            float(queued[:, 1].mean()) if len(queued) else float(rows[:, 1].mean()),
            float(rows[:, 1].mean()),
            float(rows[:, 3].mean()),
            float((training <= AT_ONCE_S).mean()),
            float((training > 600.0).mean()),
            float((without <= 10.0).mean()),
            float((without <= 180.0).mean()),
            max(found for user, found in p99.items() if user not in only_cpu),
            max(found for user, found in p99.items() if user in only_cpu),
            aborted / len(without),
            moved / len(training),
            float(np.mean([1 <= more <= 5 for more in self._more])),
            float(np.mean([-20 <= more <= -1 for more in self._more])),
            process_time() - self._began_s,
        )


def rows(variant: Variant, found: Sequence[Outcome]) -> Iterator[Row]:
    published = PUBLISHED.get(variant, Published())
    for name, label in LABELS.items():
        here, interval = mean([100 * getattr(one, name) for one in found])
        reach, better = REACH.get(name, (None, "higher")) if variant == CODA else (None, "higher")
        yield Row(
            label,
            here,
            getattr(published, name, None),
            interval,
            reach,
            better,
        )


def against_fifo(runs: Mapping[Variant, Sequence[Outcome]]) -> Iterator[Row]:
    """How much faster trainings are on the GPUs that they hold than under FIFO, in percent of it."""
    fifo = PUBLISHED[FIFO].utilisation
    assert fifo is not None
    for variant in (DRF, CODA, *ABLATIONS):
        pairs = zip(runs[variant], runs[FIFO], strict=True)
        here, interval = mean([100 * (ours.utilisation / theirs.utilisation - 1) for ours, theirs in pairs])
        published = PUBLISHED.get(variant)
        value = (
            None
            if published is None or published.utilisation is None
            else 100 * (published.utilisation / fifo - 1)
        )
        yield Row(variant.title, here, value, interval, value if variant == CODA else None)


def tables(quick: bool) -> Iterator[PaperTable]:
    seeds = range(QUICK_SEEDS if quick else SEEDS)
    runs: dict[Variant, Sequence[Outcome]] = {}
    for variant in (FIFO, DRF, CODA, *ABLATIONS):
        runs[variant] = [run(DAYS, variant, seed) for seed in seeds]
        yield PaperTable(
            f"coda-{variant.profile}{'-best' if variant.best_cores else '-asked'}",
            f"CODA's cluster for three days: {variant.title}",
            "%",
            list(rows(variant, runs[variant])),
        )
    yield PaperTable(
        "coda-utilisation",
        "Speed of trainings on their GPUs against FIFO",
        "% more",
        list(against_fifo(runs)),
        "Over the same trace all policies do the same work; only on the GPUs that are held can utilisation differ.",
    )
    users = [
        Row(f"{variant.title}, {kind}", fmean(getattr(one, name) for one in runs[variant]))
        for variant in (FIFO, DRF, CODA)
        for name, kind in (
            ("p99_gpu_user_s", "users 1 – 14"),
            ("p99_cpu_user_s", "users 15 – 20, CPU jobs only"),
        )
    ]
    yield PaperTable("coda-users", "Longest of the users' 99th percentiles of queueing", "s", users)
    if quick:
        return
    for variant in (FIFO, CODA):
        month = run(MONTH, variant, 0)
        time = Row("processor time, s", month.cpu_s, None, None, MONTH_CPU_S, "lower")
        title = f"The whole month, 100,000 jobs: {variant.title}"
        yield PaperTable(f"coda-month-{variant.profile}", title, "%", [*rows(variant, [month]), time])


if __name__ == "__main__":
    main("tests.papers.coda_tables", tables)
