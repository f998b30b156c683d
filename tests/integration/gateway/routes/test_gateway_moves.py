"""Who may move running jobs, what is refused before anything is in the log, and what the operator hears of
the decision."""

import asyncio
from typing import Any

import pytest

from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskStarted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from tests.integration.gateway.access import test_gateway_roles
from tests.integration.gateway.access.test_gateway_roles import CLOUD_EVENT, as_
from tests.support.cluster.driver import estimate, node_spec
from tests.support.gateway.gateway_cell import Cell, patient, problem
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
cell = test_gateway_roles.cell


async def runs(cell: Cell) -> None:
    """Job `j` on one of two nodes of four GPUs each."""
    placer = cell.placer
    for name in ("b1", "b2"):
        placer.feed(NodeJoined(node=node_spec(name)))
    placer.feed(JobSubmitted(job_id="j", spec=JobSpec(command=("true",), owner="vision")))
    placer.feed(JobEstimated(job_id="j", estimate=estimate(gpus=4)))
    job = placer.state.jobs["j"]
    for task_id, task in job.tasks.items():
        started = {"task_id": task_id, "token": job.token, "pid": 7, "started_ms": 1}
        placer.feed(TaskStarted(node_id=task.place.node_id, **started))
    await cell.tell()
    await cell.caught_up(as_("operator"))


async def test_moves_are_an_operators_affair(cell: Cell) -> None:
    """A tenant would push its neighbour off a node; a service that hands in a proposal would put it into an
    operator's mouth."""
    await runs(cell)
    here = next(iter(cell.placer.state.jobs["j"].tasks.values())).place.node_id
    [there] = {"b1", "b2"} & cell.placer.state.nodes.keys() - {here}

    async def ask(caller: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await cell.http.post("/v1/jobs/j/move", json=body, headers=as_(caller))
        return problem(answer, {"operator": answer.status_code}.get(caller, 403))

    for caller in ("vision", "speech", "reader", "node"):
        await ask(caller, {"to": [there]})
    for wrong in ({}, {"to": []}, {"to": there}, {"to": [there], "by": "ops/x"}, {"to": [there], "cores": 2}):
        assert (await ask("operator", wrong))["status"] == 400, wrong
    for to, kind, says in (
        ([here], "invalid", "runs on these nodes already"),
        (["b9"], "infeasible", "no such node"),
        ([there, there], "invalid", "2 nodes are named"),
    ):
        refused = await ask("operator", {"to": to})
        assert refused["type"].endswith(kind)
        assert says in refused["detail"]
    problem(await cell.http.post("/v1/jobs/ghost/move", json={"to": [there]}, headers=as_("operator")), 404)
    plain = as_("operator", **{"content-type": "text/plain"})
    problem(await cell.http.post("/v1/jobs/j/move", content=b"to=b2", headers=plain), 415)
    data = {
        "proposal_id": "p",
        "proposer": "migrator",
        "job_id": "j",
        "nodes": [there],
        "reason": "",
        "by": "ops/x",
    }
    body = {
        "specversion": "1.0",
        "id": "e",
        "source": "/t",
        "type": "penstock.migration.proposed.v2",
        "data": data,
    }
    forged = await cell.http.post("/v1/events", json=body, headers=as_("operator", **CLOUD_EVENT))
    assert problem(forged, 400)["errors"][0]["field"] == "data.by"
    assert await cell.written(Topic.PROPOSALS) == []


async def test_the_operator_hears_what_is_decided_and_everybody_allowed_sees_it(cell: Cell) -> None:
    """A node's fans are loud; its job moves to the other one."""
    await runs(cell)
    here = next(iter(cell.placer.state.jobs["j"].tasks.values())).place.node_id
    [there] = {"b1", "b2"} & cell.placer.state.nodes.keys() - {here}
    body = {"to": [there], "reason": "its fans are loud"}
    with patient():
        asked = asyncio.ensure_future(cell.http.post("/v1/jobs/j/move", json=body, headers=as_("operator")))
        [envelope] = await await_until(lambda: cell.written(Topic.PROPOSALS), "the gateway's proposal")
        cell.placer.feed(envelope.data)
        await cell.tell()
        answer = await asked
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["decided"], found["nodes"]) == (True, [there])
    assert (found["move"]["outcome"], found["move"]["reason"]) == ("under_way", "its fans are loud")
    assert found["move"]["by"].startswith("ops/")
    await cell.caught_up(as_("operator"))
    why = (await cell.http.get("/v1/jobs/j/why", headers=as_("operator"))).json()
    assert why["text"].startswith(f"It moves from {here} to {there}")
    assert {name: why["move"][name] for name in found["move"]} == found["move"]
    assert why["move"]["moved"]["nodes"] == [here]
    target = why["move"]["target"]
    assert (target["candidates"][0]["nodes"], target["moved"]) == ([there], why["move"]["moved"])
    assert (target["proposer"], target["reason"]) == (why["move"]["by"], why["move"]["reason"])
    shown = (await cell.http.get("/v1/jobs/j", headers=as_("operator"))).json()
    assert shown["move"] == why["move"]
    nodes = (await cell.http.get("/v1/nodes", headers=as_("operator"))).json()["nodes"]
    assert {node["node_id"]: node["gpus_free"] for node in nodes if node["node_id"] in (here, there)} == {
        here: 0,
        there: 0,
    }
