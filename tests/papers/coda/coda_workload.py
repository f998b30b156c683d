"""A day on a part of CODA's cluster as a workload on which profiles are compared: what it takes to run it,
and its outcome in the measures of §VI.

Jobs and speeds as in `tests.papers.coda.coda_tables`: every fourth job and node of a day, a training that
moves saves in 2.5 s and launches in 20 s, a CPU job that is aborted begins anew (its job states that it does
not save). Three settings, since the source's allocator overrides what users ask for and Penstock's does not,
unless it is set to:

- *cores known*: every training is estimated with its best number of cores, as after earlier runs; users'
  numbers count no more.
- *cores searched for*: no user names cores. A training begins with N_start of its category for a first job
  (§V-B1: 3 for images, 5 for language and speech, per GPU), and its cores are searched for while it runs, by
  the source's walk or by ours.
- *cores named*: users name cores, as in the source's trace.

Trainings that are there at the start came before the first day and would be running: they count in completion
times, not in what starts at once (within a second).
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Literal, NamedTuple

from msgspec.structs import replace

from penstock.model.nouns.settings import Contention, Stage
from penstock.model.nouns.types import Category, Estimate
from penstock.simulator.commands.options import validate
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.catalogue import Run, work_for
from penstock.simulator.traces.jobs import TraceJob
from penstock_papers.generators.coda_month import CORES_PER_NODE
from penstock_services.estimator.core.resources.cores import n_start
from tests.papers.coda.coda_runs import AT_ONCE_S, DAYS, EACH, PART, cost_of, with_best, workload
from tests.papers.parallel_runs import simulated
from tests.support.cli.command_line import simulate_options

Cores = Literal["known", "searched", "named"]
CATEGORIES: Mapping[str, Category] = {
    "bert": "nlp",
    "gnmt": "nlp",
    "lstm": "nlp",
    "transformer": "nlp",
    "deepspeech": "speech",
    "m5": "speech",
}
"""Of Synergy's models; the others work on images."""


class Outcome(NamedTuple):
    trainings_s: float
    """Mean completion time of jobs with GPUs."""
    cpu_jobs_s: float
    at_once: float
    """Share of the trainings, 0 – 1."""
    in_3_min: float
    """Share of the CPU jobs that start so soon."""


NONE = Outcome(1.0, 1.0, 1.0, 1.0)


@simulated(NONE)
def run(
    profile: str,
    cores: Cores,
    seed: int,
    without: tuple[Stage, ...] = (),
    contention: Contention | None = None,
) -> Outcome:
    """`without`, `contention`: as `PlacerSettings`."""
    given = validate(simulate_options(DAYS))
    nodes, jobs = given.cluster.under(seed)[::EACH], workload(PART, seed)
    settings = replace(given.settings(profile, seed), without=without, contention=contention)
    work = work_for(given.job_model, jobs, given.path, settings, Run(nodes=nodes, cost_of=cost_of))
    options = given.options._replace(saves=_has_gpus)
    if cores == "known":
        options = options._replace(predicts=with_best)
    if cores == "searched":
        options = options._replace(predicts=with_n_start, names_cores=lambda job: not job.gpus)
    simulation = Simulation(nodes, settings, work, jobs.jobs, options)
    while simulation.step():
        pass
    assert simulation.figures(0, 0).unfinished_jobs == 0
    lives = list(simulation.meter.lives.values())
    trainings = [life for life in lives if life.job.gpus]
    cpu_jobs = [life for life in lives if not life.job.gpus]
    waits_s = {
        life.job.job_id: life.first_start_s - life.job.submit_s
        for life in lives
        if life.first_start_s is not None
    }
    came = [life for life in trainings if life.job.submit_s > 0]
    return Outcome(
        fmean(life.jct_s for life in trainings),
        fmean(life.jct_s for life in cpu_jobs),
        fmean(waits_s[life.job.job_id] <= AT_ONCE_S for life in came),
        fmean(waits_s[life.job.job_id] <= 180.0 for life in cpu_jobs),
    )


def with_n_start(job: TraceJob, estimate: Estimate) -> Estimate:
    """As CODA's allocator begins, and the estimator's with it."""
    start = n_start(CATEGORIES.get(job.model, "cv"), (), (), CORES_PER_NODE, gpus=job.gpus)
    if not job.gpus or start is None:
        return estimate
    return replace(estimate, worker=replace(estimate.worker, cores=start.cores))


def _has_gpus(job: TraceJob) -> bool:
    return job.gpus > 0
