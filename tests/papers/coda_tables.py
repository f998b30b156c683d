"""CODA's month through the real engine, beside §VI: `python -m tests.papers.coda_tables`.

Jobs are those of `penstock.simulator.generators.coda_month`, speeds those of Synergy's table with contention for memory bandwidth. A save or launch of a training that moves takes
2.5 and 20 s; a CPU job that is aborted begins anew. The utilisation of a GPU is the speed of its training relative to that on the best number of cores: the source's is that of the
hardware, which is below 1 at its best. Figures are sampled each five minutes (of the month each twenty) from half a day on until the last arrival. Intervals: 95 % over seeds, resampled.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import ceil
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
from tests.papers.tables import PaperTable, Row, main
from tests.support.command_line import simulate_options

SEEDS, QUICK_SEEDS = 8, 4
DAYS, MONTH = "coda/3-days", "coda/month"
WARM_UP_S = 43_200.0
RESAMPLES = 2_000
AT_ONCE_S = 1.0
TRAINING = RestartCost(2.5, 20.0, 0.0)
ABORTED = RestartCost(begins_anew=True)
ENOUGH = 0.98
"""Of the best speed: the fewest cores with so much of it are the best number."""


class Outcome(NamedTuple):
    """Of one run; shares 0 – 1."""

    utilisation: float
    active: float
    """GPUs held, while jobs with GPUs wait."""
    allocated: float
    """GPUs held, always."""
    fragmented: float
    """GPUs free while jobs with GPUs wait that ask for no more than are free."""
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
    cpu_s: float


NONE = Outcome(*[0.5] * len(Outcome._fields))


class Variant(NamedTuple):
    title: str
    profile: str
    best_cores: bool = False
    """Trainings get the best number of cores from the start; else what they ask for."""


FIFO = Variant("FIFO", "fifo")
DRF = Variant("DRF", "drf")
CODA = Variant("CODA's arrays, best cores", "coda", best_cores=True)
ABLATIONS = (
    Variant("CODA's arrays, cores as asked for", "coda"),
    Variant("FIFO, best cores", "fifo", best_cores=True),
    Variant("DRF, best cores", "drf", best_cores=True),
)


@cache
def cpu() -> Cpu:
    return Cpu(read_sensitivity(source("coda", "synergy") / SENSITIVITY))


@cache
def best(model: str, gpus: int) -> tuple[int, float]:
    """(fewest cores with nearly the best speed, the best speed) of a job that has a node."""
    speeds = {
        cores: cpu().relative(model, cores / gpus, gpus=gpus)
        for cores in range(gpus, CORES_PER_NODE + 1)
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
    meter = Samples(simulation, work, 300.0 if trace == DAYS else 1_200.0, jobs.jobs[-1].submit_s)
    while meter.step():
        pass
    return meter.outcome()


class Samples:
    """A run, sampled at equal times."""

    def __init__(self, simulation: Simulation, work: RestartingWork, each_s: float, until_s: float) -> None:
        self._simulation, self._work = simulation, work
        self._each_s, self._until_s = each_s, until_s
        self._next_s = WARM_UP_S
        self._rows: list[tuple[float, float, bool, float]] = []

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
            float(rows[:, 0].mean()),
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
            0.0,
        )


if __name__ == "__main__":
    import sys, time
    t=time.process_time()
    v={"fifo":FIFO,"drf":DRF,"coda":CODA,"coda-asked":ABLATIONS[0],"fifo-best":ABLATIONS[1],"drf-best":ABLATIONS[2]}[sys.argv[2]]
    for k,x in run(sys.argv[1],v,int(sys.argv[3]))._asdict().items(): print(v.title,k,round(x,4))
    print(time.process_time()-t)
