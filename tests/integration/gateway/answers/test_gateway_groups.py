"""Groups as users see them: `penstock get groups`, and how a member's description names its group and what it
waits for turns."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.cli.app import run as penstock
from penstock.model.inputs.external_events import StepsMeasured
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, running

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


async def shown(cell: Cell, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `penstock …` prints for people, on one line."""
    assert await asyncio.to_thread(penstock, ["--server", cell.url, *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def group(cell: Cell, *job_ids: str, name: str) -> None:
    jobs = tuple(ProposedJob(job_id=job_id, nodes=("n0",)) for job_id in job_ids)
    unit = ProposedUnit(jobs=jobs, kind="group", explanation="one reads while the other learns")
    cell.placer.feed(PlanProposed(proposal_id=name, proposer="batcher", units=(unit,)))


async def test_a_group_is_listed_with_who_joined_last(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    """`a` runs alone, `b` joins it, then `c`; `b` reports what it waits for its turns; `c` ends again, and
    the others go on."""
    placer = cell.placer
    placer.join(node_spec("n0", 1))
    placer.submit("a")
    placer.start("a")
    await cell.tell()
    await cell.caught_up()
    assert (await cell.http.get("/v1/groups")).json()["groups"] == []
    assert await shown(cell, capsys, "get", "groups") == "No jobs share whole GPUs."
    alone = (await cell.http.get("/v1/jobs/a")).json()
    assert (alone["group"], alone["waits"]) == (None, None)
    for job_id in ("b", "c"):
        placer.submit(job_id)
    group(cell, "a", "b", name="first")
    group(cell, "a", "b", "c", name="second")
    placer.start("b")
    task = next(iter(placer.state.jobs["b"].tasks))
    named = {"node_id": "n0", "task_id": task, "token": placer.state.jobs["b"].token, "at_ms": 7}
    placer.feed(StepsMeasured(**named, done=10, steps=9, step_ms=188.0, waited_ms=24.1, missed_turns=1))
    await cell.tell()
    await cell.caught_up()
    [found] = (await cell.http.get("/v1/groups")).json()["groups"]
    assert found["job_ids"] == ["a", "b", "c"]
    assert (found["nodes"], found["gpus"]) == (["n0"], 1)
    assert (found["by"], found["reason"]) == ("batcher", "one reads while the other learns")
    assert found["turns"] is None, "nothing was predicted"
    listed = await shown(cell, capsys, "get", "groups", "-o", "wide")
    assert "n0 1 " in listed
    assert listed.endswith("a – batcher one reads while the other learns b – c –")
    member = (await cell.http.get("/v1/jobs/b")).json()
    assert member["group"] == found
    assert member["waits"] == {"at_ms": 7, "step_ms": 188.0, "waited_ms": 24.1, "missed_turns": 1}
    described = await shown(cell, capsys, "describe", "job", "b")
    assert "Takes turns with a and c since " in described
    assert (
        "asked for by batcher: one reads while the other learns; 24.1 of 188 ms an iteration are waiting"
        in described
    )
    assert "1 stage without a turn" in described
    placer.start("c")
    placer.finish("c")
    await cell.tell()
    await cell.caught_up()
    [left] = (await cell.http.get("/v1/groups")).json()["groups"]
    assert left["job_ids"] == ["a", "b"]
    assert left["seq"] < found["seq"], "by the record with which the youngest of them joined"
