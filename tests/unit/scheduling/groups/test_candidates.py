"""What regroup stages are asked: candidates know the stages of their iterations from the record of a profile
on, and nothing that is cached of them is out of date."""

from collections.abc import Callable
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from penstock.ledger.derived.stages import times_of
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.inputs.estimates import StagesProfiled
from penstock.model.inputs.external_events import (
    JobHoldRequested,
    JobProgress,
    JobReleaseRequested,
    NodeCordoned,
    NodeUncordoned,
    TaskCheckpointed,
    WorkProgressed,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, StageTimes
from penstock.model.proposals import PlanProposed
from penstock.scheduling.groups.candidates import Candidates, first_of, shape_of
from penstock.scheduling.groups.fair_interleave import FairInterleave
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.remaining_time import gpus_of, received_s, remaining_s
from penstock.scheduling.stages.regroup import PROPOSER, Regroup
from penstock_papers.muri.muri import muri_l, muri_s
from penstock_papers.settings import Grouping
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec
from tests.unit.scheduling.groups.test_group_plan import carried_out

PROFILE = StagesProfiled(
    model="resnet50",
    batch_size=64,
    gpus=2,
    storage_ms=6.5,
    cpu_ms=12.0,
    gpu_ms=38.25,
    network_ms=4.25,
    idle_ms=0.0,
    iteration_ms=61.0,
    iterations=20,
)


def by_order(state: CellState, job: JobState, cost_s: float = 0.0) -> float:
    return float(job.order)


def stages(candidates: Candidates, cell: CellDriver) -> dict[str, StageTimes | None]:
    question = candidates.question(cell.state)
    assert question is not None
    return {job.job_id: job.stages for job in question.jobs}


def test_a_profile_counts_for_who_runs_and_who_waits_from_its_record_on() -> None:
    """One of a kind runs, others wait and were asked about before; then the first has shown what an iteration
    of theirs uses, and later that it has changed. Workers with parameter servers cannot take turns, whatever
    they use."""
    cell = CellDriver(PlacerSettings(profile="fifo"))
    cell.join(node_spec("n1", 2))
    spec = replace(job_spec(workers=2), model="resnet50", batch_size=64)
    cell.submit("runs", spec, estimate(1))
    cell.submit("waits", spec, estimate(1))
    cell.submit("servers", replace(spec, parameter_servers=1), estimate(1))
    candidates = Candidates("test", by_order, per_gpus=4)
    assert stages(candidates, cell) == {"runs": None, "waits": None, "servers": None}
    for profile in (PROFILE, replace(PROFILE, gpu_ms=40.0)):
        cell.feed(profile)
        times = times_of(profile)
        assert stages(candidates, cell) == {"runs": times, "waits": times, "servers": None}


STAGES: tuple[Callable[[], Regroup], ...] = (
    FairInterleave,
    lambda: Interleave(group_plan),
    lambda: muri_s(Grouping(), group_plan),
    lambda: muri_l(Grouping(), group_plan),
)


def a_job(random: Random, number: int) -> tuple[JobSpec, Estimate]:
    """With and without whole GPUs, deadlines, checkpoints, known stages and run times."""
    spec = JobSpec(
        command=("x",),
        owner=random.choice(("ada", "bob")),
        priority=random.choice((0, 0, 5)),
        checkpoint=random.choice(("none", "signal", "sdk")),
        preemptible=random.random() < 0.8,
        grace_ms=random.choice((0, 60_000)),
        deadline_ms=random.choice((None, None, None, 900_000)),
        model=random.choice((None, "resnet50")),
        batch_size=64,
    )
    need = estimate(random.choice((0, 1, 1, 2, 4)))
    if random.random() < 0.6:
        need = replace(need, run_ms=random.randint(1, 10_000) * 1_000)
    if random.random() < 0.2 and need.worker.gpus == 1:
        need = replace(need, worker=replace(need.worker, gpu_share_milli=500))
    if random.random() < 0.5:
        need = replace(need, stages=replace(times_of(PROFILE), cpu_ms=float(number)))
    return spec, need


def something_happens(cell: CellDriver, random: Random, number: int) -> None:
    """One event of a job, a node or a profile."""
    jobs = list(cell.state.jobs.values())
    job = random.choice(jobs) if jobs else None
    cell.now_ms += random.choice((0, 1, 1_000, 60_000))
    what = random.randrange(8)
    if job is None or what == 0:
        cell.submit(f"j{number}", *a_job(random, number))
    elif what == 1:
        carried_out(cell)
    elif what == 2 and job.status is JobStatus.RUNNING:
        for task_id in list(job.tasks):
            cell.exit(task_id)
    elif what == 3:
        report = JobProgress(
            job_id=job.job_id,
            attained_s=random.random() * 1_000,
            remaining_s=random.choice((None, random.random() * 1_000)),
        )
        cell.feed(WorkProgressed(node_id="n0", jobs=(report,)))
    elif what == 4 and job.status is JobStatus.RUNNING:
        task_id, task = next(iter(job.tasks.items()))
        saved = TaskCheckpointed(
            node_id=task.place.node_id,
            task_id=task_id,
            token=job.token,
            at_ms=cell.now_ms,
            save_ms=random.choice((0, 90_000)),
        )
        cell.feed(saved)
    elif what == 5:
        cell.feed(replace(PROFILE, gpu_ms=float(number)))
    elif what == 6:
        if cell.state.nodes["n1"].cordon is None:
            cell.feed(NodeCordoned(node_id="n1", by="ops", reason="maintenance"))
        else:
            cell.feed(NodeUncordoned(node_id="n1", by="ops", reason="done"))
    elif job.held is None:
        cell.feed(JobHoldRequested(job_id=job.job_id))
    else:
        cell.feed(JobReleaseRequested(job_id=job.job_id))


def it_plans(stage: Regroup, cell: CellDriver, number: int) -> None:
    question = stage.question(cell.state)
    if question is not None:
        plan = stage.plan(cell.state, stage.solve(question))
        cell.feed(
            PlanProposed(
                proposal_id=f"p{number}",
                proposer=PROPOSER,
                units=tuple(plan.units),
                stops=tuple(plan.stops),
                ranks=tuple(plan.ranks),
            )
        )


@pytest.mark.parametrize("seed", range(4))
def test_what_is_cached_between_questions_changes_none(seed: int) -> None:
    """Jobs come, run, report, save, share GPUs by the plans of one of the stages, are held and end; a node is
    taken out of use and profiles change. After each event a stage that has answered all earlier questions
    asks the same as one that begins with this state."""
    random = Random(seed)
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n0", 4), node_spec("n1", 4))
    stages = [make() for make in STAGES]
    asked = 0
    for number in range(150):
        something_happens(cell, random, number)
        for stage, make in zip(stages, STAGES, strict=True):
            question = stage.question(cell.state)
            assert question == make().question(cell.state)
            asked += question is not None
        planner = random.choice(stages)
        if random.random() < 0.3:
            it_plans(planner, cell, number)
    assert asked > 200
    assert any(job.rank is not None for job in cell.state.jobs.values())


def test_a_question_takes_the_first_jobs_of_all_rows_together() -> None:
    """A bound below, at and above the number of waiting jobs, which wait in rows of several shapes."""
    random = Random(3)
    entries = [(random.random(), number, f"j{number}", (random.randrange(3),)) for number in range(20)]
    rows = [sorted(one for one in entries if one[3] == (row,)) for row in range(3)]
    for most in (1, 7, 19, 20, 21):
        assert sorted(first_of(rows, most)) == sorted(entries)[:most]


def test_of_jobs_that_are_not_listed_those_of_earlier_queues_come_before_it_and_half_of_its_own() -> None:
    """A queue that is too long for one question, as jobs of known and of unknown run times come, run for
    days, and end: counted one by one."""
    random = Random(7)
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n0", 4), node_spec("n1", 4))
    planner = Interleave(group_plan)
    key_of = planner.key

    def key(state: CellState, job: JobState, cost_s: float = 0.0) -> float:
        return key_of(remaining_s(state, job), received_s(state, job), gpus_of(job))

    candidates = Candidates("test", key, key_of=key_of, in_all=3, attained=received_s)
    counted = set[float]()
    for number in range(300):
        cell.now_ms += random.choice((0, 20 * 3_600_000))
        something_happens(cell, random, number)
        it_plans(planner, cell, number)
        question = candidates.question(cell.state)
        if question is None:
            continue
        listed = {job.job_id for job in question.jobs}
        waiting = [cell.job(job_id) for job_id in cell.state.queue.values() if job_id not in listed]
        others = [key(cell.state, job) for job in waiting if shape_of(job)]
        for job, ahead in zip(question.jobs, question.ahead or (0.0,) * len(listed), strict=True):
            own = key_of(job.remaining_s, job.attained_s, job.gpus)
            expected = sum((other < own) + 0.5 * (other == own) for other in others)
            assert ahead == (expected if job.remaining_s == inf else 0.0)
            counted.add(ahead)
    assert len(counted) > 10
