"""Who may ask a running job for a checkpoint, and what is refused at the gateway before anything is in the
log."""

import pytest

from penstock.model.inputs.external_events import JobCheckpointRequested, JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from tests.integration.gateway.access import test_gateway_roles
from tests.integration.gateway.access.test_gateway_roles import CLOUD_EVENT, as_
from tests.support.gateway.gateway_cell import Cell, problem

pytestmark = pytest.mark.postgres
cell = test_gateway_roles.cell


async def test_a_checkpoint_is_its_owners_affair_or_an_operators(cell: Cell) -> None:
    """Another tenant would slow its neighbour down; who asks follows from the token, also where the request
    comes as an event."""
    for job_id, kind in (("j", "sdk"), ("none", "none")):
        spec = JobSpec(command=("true",), owner="vision", checkpoint=kind)  # type: ignore[arg-type]
        cell.placer.feed(JobSubmitted(job_id=job_id, spec=spec))
    await cell.tell()
    await cell.caught_up(as_("operator"))
    for caller in ("speech", "reader", "node"):
        problem(await cell.http.post("/v1/jobs/j/checkpoint", headers=as_(caller)), 403)
    for caller in ("vision", "operator"):
        waits = await cell.http.post("/v1/jobs/j/checkpoint", headers=as_(caller))
        assert problem(waits, 409)["type"].endswith("not_running")
        not_said = await cell.http.post("/v1/jobs/none/checkpoint", headers=as_(caller))
        assert "submit it with `checkpoint: sdk`" in problem(not_said, 409)["detail"]
    problem(await cell.http.post("/v1/jobs/ghost/checkpoint", headers=as_("operator")), 404)
    named = await cell.http.post("/v1/jobs/j/checkpoint", json={"by": "ops/x"}, headers=as_("operator"))
    problem(named, 400)
    assert await cell.written(Topic.JOBS) == []
    body = {
        "specversion": "1.0",
        "id": "e",
        "source": "/t",
        "type": "penstock.job.checkpoint_requested.v1",
        "data": {"job_id": "j"},
    }
    problem(await cell.http.post("/v1/events", json=body, headers=as_("speech", **CLOUD_EVENT)), 403)
    sent = await cell.http.post("/v1/events", json=body, headers=as_("vision", **CLOUD_EVENT))
    assert sent.status_code < 300, sent.text
    [written] = await cell.written(Topic.JOBS)
    assert written.data == JobCheckpointRequested(job_id="j", by="vision/ci", tenant="vision")
