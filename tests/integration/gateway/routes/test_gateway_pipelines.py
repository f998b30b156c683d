"""Pipelines at the gateway: a job is tried again, or cancelled by its key; and which job a name means."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock_services.gateway.core import followers
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import SPEC, Cell, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


async def test_a_job_that_has_ended_is_submitted_once_more(cell: Cell) -> None:
    """Its node's disk was full. The new job is linked to the old one; a lost answer makes no third one."""
    key = {"Idempotency-Key": "again"}
    missing = await cell.http.post("/v1/jobs/none/retry", headers=key)
    assert missing.status_code == 404
    cell.placer.join(node_spec("n0", 1))
    cell.placer.submit("train", spec=JobSpec(command=("true",), owner="ana"))
    cell.placer.start("train")
    await cell.tell()
    await cell.caught_up()
    early = await cell.http.post("/v1/jobs/train/retry", headers=key)
    assert (early.status_code, early.json()["type"].rpartition(":")[2]) == (409, "job_not_ended")
    cell.placer.finish("train", exit_code=1)
    await cell.tell()
    await cell.caught_up()
    first, again = [await cell.http.post("/v1/jobs/train/retry", headers=key) for _ in range(2)]
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["job_id"] == again.json()["job_id"]
    [written] = await cell.written(Topic.JOBS)
    assert isinstance(written.data, JobSubmitted)
    assert written.data.spec == JobSpec(command=("true",), owner="ana", retry_of="train")


async def test_the_job_of_a_key_is_cancelled_and_a_key_that_was_never_used_is_no_error(cell: Cell) -> None:
    """The clean-up of a pipeline runs whether or not its submission has come so far."""
    key, cancel = {"Idempotency-Key": "build-7"}, "/v1/jobs/cancel"
    unused = await cell.http.post(cancel, headers=key)
    assert (unused.status_code, unused.json()) == (200, {"job_id": None, "outcome": None})
    assert (await cell.http.post(cancel)).status_code == 400
    job_id = (await cell.http.post("/v1/jobs", json=SPEC, headers=key)).json()["job_id"]
    found = await cell.http.post(cancel, headers=key, json={"reason": "superseded"})
    assert (found.status_code, found.json()["job_id"]) == (202, job_id)
    submitted, asked = [envelope.data for envelope in await cell.written(Topic.JOBS)]
    assert isinstance(asked, JobCancelRequested)
    assert asked.reason == "superseded"
    cell.placer.feed(submitted)
    cell.placer.feed(asked)
    await cell.tell()
    await cell.caught_up()
    ended = await cell.http.post(cancel, headers=key)
    assert (ended.status_code, ended.json()) == (200, {"job_id": job_id, "outcome": "cancelled"})


async def test_a_name_in_the_form_of_an_id_is_refused(cell: Cell) -> None:
    """Else `penstock cancel ID` could mean a job that was named so."""
    job_id = (await cell.http.post("/v1/jobs", json=SPEC)).json()["job_id"]
    refused = await cell.http.post("/v1/jobs", json={**SPEC, "name": job_id})
    assert refused.status_code == 400
    [field] = refused.json()["errors"]
    assert field["field"] == "name"


async def test_a_gateway_that_was_killed_asks_in_its_next_run_who_has_come_back(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines had followed their jobs at the run before; one was killed with it, one connects again.
    How long that may take is passed over."""
    for job_id in ("back", "gone"):
        cell.placer.submit(job_id, spec=JobSpec(command=("true",), tied_to="follower"))
        at = cell.placer.state.seq
        cell.placer.feed(FollowerChanged(job_id=job_id, gateway="killed", connected=True, after=at))
    await cell.tell()
    await cell.caught_up()
    async with cell.http.stream("GET", "/v1/stream", params={"follows": ["back"]}) as stream:
        assert stream.status_code == 200
        monkeypatch.setattr(followers, "RETURNED_WITHIN_S", 0.0)
        cell.placer.submit("another")
        await cell.tell()

        async def reported() -> list[FollowerChanged]:
            found = [envelope.data for envelope in await cell.written(Topic.JOBS)]
            return [data for data in found if isinstance(data, FollowerChanged)]

        for report in await await_until(reported, "its reports"):
            cell.placer.feed(report)
        jobs = cell.placer.state.jobs
        assert jobs["back"].following.gateway not in ("", "killed")
        assert jobs["gone"].following.absent_ms is not None


async def test_a_stream_is_the_sign_of_life_of_a_pipeline(cell: Cell) -> None:
    """A step follows its job, and its runner is lost. Nobody else reports so, and nobody follows what does
    not exist."""

    async def reports(count: int) -> list[FollowerChanged]:
        async def written() -> list[FollowerChanged]:
            found = [envelope.data for envelope in await cell.written(Topic.JOBS)]
            return [data for data in found if isinstance(data, FollowerChanged)]

        async def enough() -> bool:
            return len(await written()) >= count

        await await_until(enough, f"{count} reports")
        return await written()

    async def unfollowed_ms() -> int | None:
        await cell.tell()
        await cell.caught_up()
        found: int | None = (await cell.http.get("/v1/jobs/train")).json()["unfollowed_ms"]
        return found

    cell.placer.submit("train", spec=JobSpec(command=("true",), tied_to="follower"))
    cell.placer.submit("free")
    assert await unfollowed_ms() == cell.placer.state.jobs["train"].submitted_ms
    follows = {"follows": ["train", "free"]}
    async with cell.http.stream("GET", "/v1/stream", params=follows) as stream:
        assert stream.status_code == 200
        [connected] = await reports(1)
        assert (connected.job_id, connected.connected) == ("train", True)
        cell.placer.feed(connected)
        assert await unfollowed_ms() is None
    _, lost = await reports(2)
    assert (lost.job_id, lost.connected, lost.gateway) == ("train", False, connected.gateway)
    cell.placer.feed(lost)
    assert await unfollowed_ms() == cell.placer.now_ms - lost.silent_ms
    missing = await cell.http.get("/v1/stream", params={"follows": "none"})
    assert missing.status_code == 404
    event = {"specversion": "1.0", "id": "x", "source": "/x", "type": "penstock.job.follower_changed.v1"}
    data = {"job_id": "train", "gateway": "mine", "connected": True, "after": cell.placer.state.seq}
    kind = {"content-type": "application/cloudevents+json"}
    forged = await cell.http.post("/v1/events", json={**event, "data": data}, headers=kind)
    assert (forged.status_code, forged.json()["type"].rpartition(":")[2]) == (403, "gateway_events")
