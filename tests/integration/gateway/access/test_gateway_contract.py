"""The HTTP contract: what is refused instead of ignored, and the document that describes it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock_services.gateway.shell.document import PRINTABLE
from penstock_services.gateway.shell.store import Store
from tests.support.gateway.gateway_cell import JSON, SPEC, Cell, problem, running

pytestmark = pytest.mark.postgres

STRUCTURED = {"content-type": "application/cloudevents+json"}


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


async def test_what_a_request_asks_for_is_answered_or_refused(cell: Cell) -> None:
    """A dashboard asks `?state=running`: it showed all jobs, because the parameter is called `status`."""
    refused = problem(await cell.http.get("/v1/jobs?ownr=ana&limit=3&status=running"), 400)
    [wrong] = refused["errors"]
    assert wrong["field"] == "ownr"
    assert "`owner`" in wrong["remedy"]
    everything = problem(await cell.http.get("/v1/jobs/x/why?zzzzzz=1"), 400)["errors"]
    assert "at" in everything[0]["remedy"].replace(",", "").split(), "those that are known are named"
    assert problem(await cell.http.get("/v1/gpus?at=1"), 400)["errors"][0]["remedy"] == "remove it"
    problem(await cell.http.post("/v1/jobs?name=x", json=SPEC), 400)
    assert await cell.written(Topic.JOBS) == []
    assert (await cell.http.get("/healthz?probe=7")).status_code == 200, "what probes send is theirs"

    status = problem(await cell.http.get("/v1/jobs?status=runing"), 400)
    assert "did you mean `running`?" in status["detail"]
    assert "Input" not in status["detail"]
    assert "timed_out_queued" in problem(await cell.http.get("/v1/jobs?status=zzz"), 400)["detail"]


async def test_a_method_that_does_not_exist_names_those_that_do(cell: Cell) -> None:
    """RFC 9110: a 405 has `Allow`. All methods of the path, also where routes of several methods share it."""
    for path, allowed in (
        ("/v1/jobs", "GET, POST"),
        ("/v1/jobs/x", "DELETE, GET"),
        ("/v1/events", "POST"),
        ("/v1/nodes/n/drain", "POST"),
    ):
        answer = await cell.http.put(path)
        problem(answer, 405)
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("field", "value"), [("grace_ms", False), ("workers", True), ("workers", "2"), ("target_loss", "0.5")]
)
async def test_a_number_is_a_number(cell: Cell, field: str, value: object) -> None:
    """`grace_ms: false` meant no grace at all: SIGKILL at once. The schema has always said integer."""
    [wrong] = problem(await cell.http.post("/v1/jobs", json={**SPEC, field: value}), 400)["errors"]
    assert wrong["field"] == field
    event = {"specversion": "1.0", "id": "e", "source": "/ci", "type": "penstock.job.submitted.v1"}
    event["data"] = {"job_id": "j1", "spec": {**SPEC, field: value}}  # type: ignore[assignment]
    refused = await cell.http.post("/v1/events", content=json.dumps(event), headers=STRUCTURED)
    assert problem(refused, 400)["errors"][0]["field"] == f"data.spec.{field}"


async def test_a_whole_number_may_be_written_as_a_fraction(cell: Cell) -> None:
    """JavaScript and JSON Schema know one kind of number: 2.0 is an integer."""
    answer = await cell.http.post("/v1/jobs", content='{"command": ["x"], "workers": 2.0}', headers=JSON)
    assert answer.status_code == 202, answer.text
    [event] = await cell.written(Topic.JOBS)
    assert isinstance(event.data, JobSubmitted)
    assert event.data.spec.workers == 2
    for wrong in ("2.5", "1e400", "-2.0"):
        body = f'{{"command": ["x"], "workers": {wrong}}}'
        problem(await cell.http.post("/v1/jobs", content=body, headers=JSON), 400)


async def test_the_document_describes_the_answers_to_a_submission(cell: Cell) -> None:
    """A generated client met the 200 of a repeated submission where the document names only problems."""
    document = (await cell.http.get("/openapi.json")).json()
    responses = document["paths"]["/v1/jobs"]["post"]["responses"]
    for key, status in (("a", 202), ("a", 200)):
        answer = await cell.http.post(
            "/v1/jobs", json={**SPEC, "env": {"TOKEN": "x9"}}, headers={"Idempotency-Key": key}
        )
        assert answer.status_code == status
        media = answer.headers["content-type"]
        schema = responses[str(status)]["content"][media]["schema"]
        Draft202012Validator({**schema, "components": document["components"]}).validate(answer.json())
        assert schema.get("$ref"), "not the empty schema, which allows everything"


async def test_the_schema_of_an_event_allows_what_is_accepted(cell: Cell) -> None:
    """The document said `object`: a generated client could not know that an event needs a type."""
    text = (await cell.http.get("/openapi.json")).text
    document = json.loads(
        text.replace(json.dumps(PRINTABLE), '""')
    )  # Python's `re` has no classes of Unicode
    content = document["paths"]["/v1/events"]["post"]["requestBody"]["content"]
    validator = Draft202012Validator(
        {**content["application/cloudevents+json"]["schema"], "components": document["components"]}
    )
    good = content["application/cloudevents+json"]["example"]
    validator.validate(good)
    data = good["data"]
    for wrong in (
        {},
        {**good, "specversion": "2.0"},
        {**good, "id": ""},
        {**good, "id": 7},
        {**good, "type": "penstock.nothing.v1"},
        {**good, "type": "penstock.node.joined.v1"},
        {**good, "source": ""},
        {**good, "data": None},
        {**good, "data": {**data, "job_id": "a/b"}},
        {**good, "data": {**data, "job_id": "x" * 114}},
        {**good, "data": {**data, "spec": {"command": []}}},
        {**good, "data": {**data, "spec": {"command": ["x"], "grace_ms": False}}},
        {**good, "data": {**data, "more": 1}},
    ):
        assert not validator.is_valid(wrong), wrong
        answer = await cell.http.post("/v1/events", content=json.dumps(wrong), headers=STRUCTURED)
        assert answer.status_code in (400, 403), (wrong, answer.text)
    batch = Draft202012Validator(
        {**content["application/cloudevents-batch+json"]["schema"], "components": document["components"]}
    )
    batch.validate([good])
    assert not batch.is_valid([])
    assert not batch.is_valid([{}])


async def test_an_event_in_binary_mode_without_a_content_type_is_json(cell: Cell) -> None:
    """The official SDK sends no Content-Type where the event has no datacontenttype (CloudEvents HTTP
    binding, 3.1.1)."""
    event = {
        "ce-specversion": "1.0",
        "ce-id": "e1",
        "ce-source": "/ci",
        "ce-type": "penstock.job.submitted.v1",
    }
    body = json.dumps({"job_id": "bare", "spec": {"command": ["true"]}}).encode()
    assert (await cell.http.post("/v1/events", content=body, headers=event)).status_code == 202
    [written] = await cell.written(Topic.JOBS)
    assert written.data == JobSubmitted(job_id="bare", spec=JobSpec(command=("true",)))
    problem(await cell.http.post("/v1/events", content=body), 415)
    problem(await cell.http.post("/v1/events", content=b"<x/>", headers=event), 400)
    problem(
        await cell.http.post("/v1/events", content=body, headers={**event, "content-type": "text/plain"}), 415
    )


async def test_jobs_are_found_by_their_labels_and_a_cut_list_has_its_total(cell: Cell) -> None:
    """`labels` were free text "to find it by" that nothing searched; a list ended at 50 without a word."""
    for number in range(5):
        labels = {"team": "vision" if number % 2 else "speech", "run": f"a=b,{number}"}
        spec = JobSpec(command=("true",), name=f"n{number % 3}", owner="ana", labels=labels)
        cell.placer.feed(JobSubmitted(job_id=f"j{number}", spec=spec))
    cell.placer.feed(JobCancelRequested(job_id="j3"))
    await cell.tell()
    await cell.caught_up()

    async def listed(query: str) -> tuple[list[str], int]:
        found = (await cell.http.get(f"/v1/jobs?{query}")).json()
        return [job["job_id"] for job in found["jobs"]], found["total"]

    assert await listed("label=team%3Dvision") == (["j3", "j1"], 2)
    assert await listed("label=team%3Dvision&label=run%3Da%3Db%2C1") == (["j1"], 1)
    assert await listed("label=team%3Dvision&status=cancelled") == (["j3"], 1)
    assert await listed("label=team%3Dnone") == ([], 0)
    assert await listed("label=team%3Dvision&label=team%3Dspeech") == ([], 0)
    assert await listed("limit=2") == (["j4", "j3"], 5)
    assert await listed("limit=2&label=team%3Dspeech") == (["j4", "j2"], 3)
    second = (await cell.http.get("/v1/jobs?limit=2")).json()["next_cursor"]
    assert await listed(f"limit=2&cursor={second}") == (["j2", "j1"], 5)
    assert await listed("limit=100") == (["j4", "j3", "j2", "j1", "j0"], 5)
    assert await listed("name=n0") == (["j3", "j0"], 2)
    assert await listed("name=n0&label=team%3Dvision&prefix=j&owner=ana") == (["j3"], 1)
    assert await listed("prefix=j4") == (["j4"], 1)
    assert await listed("prefix=%25") == ([], 0)
    queue = (await cell.http.get("/v1/queue?label=team%3Dspeech&name=n1")).json()
    assert ([job["job_id"] for job in queue["jobs"]], queue["waiting"]) == (["j4"], 1)
    assert (await cell.http.get("/v1/queue?owner=bob")).json()["jobs"] == []
    assert problem(await cell.http.get("/v1/queue?state=queued"), 400)["errors"][0]["field"] == "state"
    for wrong in ("team", "=x", "%00%3Dx"):
        [error] = problem(await cell.http.get(f"/v1/jobs?label={wrong}"), 400)["errors"]
        assert error["message"] == f"{wrong!r} is not NAME=VALUE" or "%00" in wrong


@pytest.mark.parametrize(
    ("asked", "index"),
    [
        ("status=running", "jobs_live"),
        ("status=queued&owner=ben", "jobs_live"),
        ("status=failed", "jobs_by_outcome"),
        ("owner=ben", "jobs_by_owner"),
        ("name=n7", "jobs_by_name"),
        ("label=team%3Dvision", "jobs_by_label"),
        ("limit=5", "jobs_by_age"),
    ],
)
async def test_a_list_of_jobs_reads_few_rows(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, asked: str, index: str
) -> None:
    """After months of a cell, a look at its three running jobs read each of the thousands that had ended."""
    cell.placer.run(["a"])
    await cell.tell()
    await cell.caught_up()
    queries: list[tuple[str, tuple[Any, ...]]] = []
    rows = Store.rows

    async def noted(store: Store, query: str, *arguments: Any) -> list[str]:
        queries.append((query, arguments))
        return await rows(store, query, *arguments)

    admin = await asyncpg.connect(cell.dsn, server_settings={"search_path": "penstock"})
    await admin.execute(MANY_ENDED)
    await admin.execute("ANALYZE jobs")
    monkeypatch.setattr(Store, "rows", noted)
    answer = (await cell.http.get(f"/v1/jobs?{asked}")).json()
    assert answer["jobs"]
    query, arguments = next(each for each in queries if "row_to_json(jobs)" in each[0])
    plan = "\n".join(row[0] for row in await admin.fetch(f"EXPLAIN {query}", *arguments))
    await admin.close()
    assert index in plan, plan
    assert "Seq Scan" not in plan, plan


MANY_ENDED = """
INSERT INTO jobs (
    job_id, seq, name, owner, status, workers, parameter_servers, attempt, infrastructure_retries,
    submitted_seq, submitted_ms, ended_ms, outcome, reason, nodes, gpus, labels, spec
)
SELECT
    'old-' || i, i, 'n' || i, CASE WHEN i % 300 = 1 THEN 'ben' ELSE 'ana' END, status, 1, 0, 1, 0,
    -i, i, CASE WHEN ended THEN i END, CASE WHEN ended THEN status END, '', '{}',
    1, CASE WHEN i % 300 = 1 THEN '{"team": "vision"}' ELSE '{}' END::json, '{}'
FROM (
    SELECT i, status, status NOT IN ('running', 'queued') AS ended
    FROM generate_series(1, 3000) AS i,
        LATERAL (
            SELECT coalesce((ARRAY['queued', 'running', 'failed'])[i], 'succeeded') AS status
        ) AS chosen
) AS jobs_of_months
"""
