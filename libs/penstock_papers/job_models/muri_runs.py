"""Job model `muri` for one trace and one profile: which of its simulator's ways a run calls for, as the
source has it."""

from penstock.runtime.files.csv_import import BadFile, Problem
from penstock.scheduling.profiles import profile_for
from penstock.simulator.job_models.catalogue import Asked, start_up_of
from penstock.simulator.job_models.measurements.tables import STAGE_PROFILES
from penstock.simulator.job_models.model import Work
from penstock.text.counting import count
from penstock_papers.baselines.preempting.tiresias import Tiresias
from penstock_papers.job_models.muri import MuriWork
from penstock_papers.muri.muri import Muri


def muri(asked: Asked) -> Work:
    """Stage times from the trace, start-up times from `stage_profiles.csv`. Raises `BadFile` where a job has
    none."""
    trace, path = asked.trace, asked.path
    if any(job.stages is None for job in trace.jobs):
        raise BadFile(str(path), [Problem(0, "", "job model muri needs stage times: a trace of format muri")])
    start_up_s = start_up_of(path)
    unknown = [
        trace.problem(
            job, "model", f"{STAGE_PROFILES} has no start-up time of {job.model} on {count(job.gpus, 'GPU')}"
        )
        for job in trace.jobs
        if (job.model, job.gpus) not in start_up_s
    ]
    if unknown:
        raise BadFile(str(path), unknown)
    profile = profile_for(asked.settings)
    stage, regroup = profile.preempt, profile.regroup
    if isinstance(regroup, Muri):
        return MuriWork(
            start_up_s,
            as_submitted=regroup.expects,
            matched=regroup.grouping.matching,
            arrivals_s=sorted(job.submit_s for job in trace.jobs),
        )
    return MuriWork(start_up_s, stage.limits_gpu_s if isinstance(stage, Tiresias) else ())
