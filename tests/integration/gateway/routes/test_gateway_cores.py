"""Who may change the cores of running tasks, and what is refused at the gateway before anything is in the
log."""

from typing import Any

import pytest

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from tests.integration.gateway.access import test_gateway_roles
from tests.integration.gateway.access.test_gateway_roles import CLOUD_EVENT, as_
from tests.support.gateway.gateway_cell import Cell, problem

pytestmark = pytest.mark.postgres
cell = test_gateway_roles.cell


async def test_cores_of_running_tasks_are_an_operators_affair(cell: Cell) -> None:
    """A tenant would take its neighbours' cores; a service that hands in a proposal would put it into an
    operator's mouth."""
    cell.placer.feed(JobSubmitted(job_id="j", spec=JobSpec(command=("true",), owner="vision")))
    await cell.tell()
    await cell.caught_up(as_("operator"))
    asked = {"cores": 2, "reason": "it starves"}

    async def ask(caller: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await cell.http.post("/v1/jobs/j/cores", json=body, headers=as_(caller))
        return problem(answer, {"operator": answer.status_code}.get(caller, 403))

    for caller in ("vision", "speech", "reader", "node"):
        await ask(caller, asked)
    assert (await ask("operator", asked))["type"].endswith("not_running")
    assert "no task w3 of job j" in (await ask("operator", {**asked, "task": "w3"}))["detail"]
    for wrong in (
        {},
        {"cores": 0},
        {"cores": "many"},
        {**asked, "by": "ops/somebody"},
        {**asked, "coers": 2},
    ):
        assert (await ask("operator", wrong))["status"] == 400, wrong
    plain = await cell.http.post(
        "/v1/jobs/j/cores", content=b"cores=2", headers=as_("operator", **{"content-type": "text/plain"})
    )
    problem(plain, 415)
    data = {
        "proposal_id": "p",
        "proposer": "guard",
        "task_id": "j.1.w0",
        "cores": 2,
        "reason": "",
        "by": "ops/on-call",
    }
    body = {
        "specversion": "1.0",
        "id": "e",
        "source": "/t",
        "type": "penstock.cores.proposed.v1",
        "data": data,
    }
    forged = await cell.http.post("/v1/events", json=body, headers=as_("operator", **CLOUD_EVENT))
    assert problem(forged, 400)["errors"][0]["field"] == "data.by"
    assert await cell.written(Topic.PROPOSALS) == []
