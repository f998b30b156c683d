"""A bug in a policy costs the choice, not the fact: placer shells in virtual time whose policy raises."""

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from penstock.cluster.assignment import Plan
from penstock.cluster.view import assign
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.log.port import Partition
from penstock.model.decisions.orders import StopTask
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    NodeJoined,
    NodeLeft,
    TaskExited,
    TaskStarted,
)
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.topics import Topic
from penstock.scheduling.place import together
from penstock_services.placer.shell import service as placer
from penstock_services.placer.shell.replay import Replayer
from tests.faults.guards.test_guards import ORDERS, Stage, play, submission
from tests.support.cluster.driver import node_spec
from tests.support.log.memory_log import MemoryLog

LETTERS = Partition(Topic.DEAD_LETTERS, 0)


class Bug:
    """The place stage of the default profile raises for the jobs in `hits`; for all jobs if it holds "*"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits: set[str] = set()
        real = together.Together.place_within

        def place(policy: together.Together, nodes: int, state: CellState, job: JobState) -> Plan | None:
            if {"*", job.job_id} & self.hits:
                raise KeyError(f"no score for {job.job_id}")
            return real(policy, nodes, state, job)

        monkeypatch.setattr(together.Together, "place_within", place)


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bug]:
    return Bug(monkeypatch)


def of_task(stage: Stage, job_id: str) -> dict[str, Any]:
    """What a report about the job's first task must name."""
    job = stage.replica().state.jobs[job_id]
    [task] = job.tasks.values()
    return {"node_id": task.place.node_id, "task_id": task.place.task_id, "token": job.token, "started_ms": 1}


def placed(stage: Stage, job_id: str) -> bool:
    job = stage.replica().state.jobs.get(job_id)
    return job is not None and bool(job.tasks)


async def running(stage: Stage, job_id: str) -> None:
    await stage.send(*submission(job_id))
    await stage.until(lambda: placed(stage, job_id), f"{job_id} is placed")
    await stage.send(TaskStarted(**of_task(stage, job_id), pid=1))
    await stage.until(lambda: stage.replica().state.jobs[job_id].status == "running", f"{job_id} runs")


def stops(stage: Stage) -> list[str]:
    return [
        orjson.loads(record.value)["task_id"]
        for record in stage.broker.records(ORDERS)
        if dict(record.headers)["ce_type"].decode().startswith(StopTask.TYPE)
    ]


async def replays(stage: Stage) -> None:
    report = await Replayer(MemoryLog(stage.broker, "replay"), 0).run()
    assert report.different == 0, report.differences


def test_a_policy_that_raises_always_holds_up_nothing_but_placements(bug: Bug) -> None:
    """An upgrade brings a policy that raises for every job: running jobs end, cancellations stop, nodes join
    and leave.

    The placer stays in office meanwhile; once the policy is mended the waiting jobs start by themselves.
    """

    async def scenario(stage: Stage) -> None:
        stage.start(placer.run)
        await stage.send(NodeJoined(node=node_spec("n1")))
        await running(stage, "ends")
        await running(stage, "cancelled")
        bug.hits = {"*"}
        await stage.send(*submission("waits"))
        await stage.until(lambda: "waits" in stage.replica().state.jobs, "the submission is folded")
        await stage.send(TaskExited(**of_task(stage, "ends"), cause="exited", exit_code=0, exited_ms=2))
        await stage.until(lambda: stage.replica().state.ended.get("ends") == "succeeded", "the exit counts")
        await stage.send(JobCancelRequested(job_id="cancelled"))
        await stage.until(lambda: len(stops(stage)) == 1, "the stop is ordered")
        await stage.send(NodeJoined(node=node_spec("n2")), NodeJoined(node=node_spec("n3")))
        await stage.until(lambda: {"n2", "n3"} <= stage.replica().state.nodes.keys(), "nodes join")
        await stage.send(NodeLeft(node_id="n3", boot_id="b1", proof="deleted"))
        await stage.until(lambda: stage.replica().state.nodes["n3"].status == "gone", "a node leaves")
        state = stage.replica().state
        assert state.term == 1, "a bug in a policy ends no term"
        assert state.jobs["waits"].status is JobStatus.QUEUED
        assert state.failed_choices.count > 0
        assert state.failed_choices.profile == "penstock"
        assert "KeyError: 'no score for waits'" in state.failed_choices.error
        letters = [orjson.loads(record.value) for record in stage.broker.records(LETTERS)]
        assert letters
        assert all("policy penstock" in letter["detail"] for letter in letters), letters
        bug.hits = set()
        await stage.until(lambda: placed(stage, "waits"), "it starts by itself")
        await replays(stage)

    play(scenario)


def test_a_job_on_which_the_policy_raises_holds_up_no_other(bug: Bug) -> None:
    """One job of an odd shape trips the policy. It stands first in line; everybody behind it is placed all
    the same."""

    async def scenario(stage: Stage) -> None:
        stage.start(placer.run)
        bug.hits = {"odd"}
        await stage.send(NodeJoined(node=node_spec("n1")))
        await stage.send(*submission("odd"))
        for number in range(12):
            await running(stage, f"j{number}")
            exit_ = TaskExited(**of_task(stage, f"j{number}"), cause="exited", exit_code=0, exited_ms=2)
            await stage.send(exit_)
        await stage.until(lambda: len(stage.replica().state.ended) == 12, "all others ran")
        assert stage.replica().state.term == 1
        assert stage.replica().state.jobs["odd"].status is JobStatus.QUEUED
        await replays(stage)

    play(scenario)


def test_a_plan_that_cannot_be_folded_is_not_carried_out(monkeypatch: pytest.MonkeyPatch, bug: Bug) -> None:
    """The policy names a node that is not in the cell: the fold refuses that decision, and the exit before it
    stands."""

    async def scenario(stage: Stage) -> None:
        stage.start(placer.run)
        await stage.send(NodeJoined(node=node_spec("n1", gpus=1)))
        await running(stage, "first")
        await stage.send(*submission("second"))
        real = placer_assign()
        broken = [True]

        def assign(state: CellState, job: JobState, plan: Plan) -> Any:
            found = real(state, job, plan)
            if not broken:
                return found
            from msgspec.structs import replace

            return replace(found, tasks=tuple(replace(task, node_id="nowhere") for task in found.tasks))

        monkeypatch.setattr("penstock_services.placer.core.decide.assign", assign)
        await stage.send(TaskExited(**of_task(stage, "first"), cause="exited", exit_code=0, exited_ms=2))
        await stage.until(lambda: stage.replica().state.ended.get("first") == "succeeded", "the exit counts")
        assert stage.replica().state.jobs["second"].status is JobStatus.QUEUED
        broken.clear()
        await stage.until(lambda: placed(stage, "second"), "it starts by itself")
        await replays(stage)

    play(scenario)


def placer_assign() -> Any:

    return assign
