"""Plans of a regroup stage, and what the placer makes of them."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from penstock.model.decisions.groups import Turns
from penstock.model.nouns.types import Estimate
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, estimate


def turns(*job_ids: str, speed: float = 0.5) -> Turns:
    speeds = (speed,) * len(job_ids)
    return Turns(
        job_ids=job_ids, period_ms=100.0, efficiency=0.7, speeds=speeds, alternative="apart: 10 % less"
    )


def unit(*job_ids: str, nodes: Sequence[str], with_turns: bool = True) -> ProposedUnit:
    jobs = tuple(ProposedJob(job_id=job_id, nodes=tuple(nodes)) for job_id in job_ids)
    if len(jobs) == 1:
        return ProposedUnit(jobs=jobs, explanation="alone")
    return ProposedUnit(
        jobs=jobs, explanation="take turns", kind="group", turns=turns(*job_ids) if with_turns else None
    )


def plan(*units: ProposedUnit, stops: Sequence[str] = (), name: str = "p1", **more: Any) -> PlanProposed:
    return PlanProposed(proposal_id=name, proposer="batcher", units=units, stops=tuple(stops), **more)


def running(cell: CellDriver, *job_ids: str, gpus: int = 4) -> None:
    for job_id in job_ids:
        cell.submit(job_id, need=estimate(gpus))
        cell.start(job_id)


def facts(step: Step, kind: type[Any]) -> list[Any]:
    return [fact for fact in step.facts if isinstance(fact, kind)]


def made_way(cell: CellDriver, job_id: str) -> Step:
    """It ends within its grace."""
    job = cell.job(job_id)
    step = None
    for task_id in list(job.tasks):
        step = cell.exit(task_id, None, cause="stopped", signal=15)
    assert step is not None
    return step


def timed(gpus: int, run_ms: int) -> Estimate:
    return replace(estimate(gpus), run_ms=run_ms)
