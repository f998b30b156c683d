"""Handing in jobs and events over real HTTP: what the gateway promises, and how it refuses."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio

from penstock.errors import AppendFailed, LogError, NotAllowed, TooLarge
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.schema.topics import Topic
from penstock.runtime.database.migrations import schema_of
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.gateway.gateway_cell import JSON, SPEC, Cell, Faulty, problem, running
from tests.support.installation.services import port_of
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


# ------------------------------------------------------------------------------------------- submit


async def test_a_submitted_job_is_in_the_log_and_can_be_seen_at_once(cell: Cell) -> None:
    """CI submits and asks in the next breath, while no placer is up: the job is there, waiting to be taken
    in."""
    accepted = await cell.http.post("/v1/jobs", json=SPEC)
    assert accepted.status_code == 202
    job_id = accepted.json()["job_id"]
    assert accepted.headers["location"] == f"/v1/jobs/{job_id}"
    seen = (await cell.http.get(f"/v1/jobs/{job_id}")).json()
    assert (seen["job_id"], seen["status"], seen["owner"]) == (job_id, "submitted", "ana")
    (event,) = await cell.written(Topic.JOBS)
    assert isinstance(event.data, JobSubmitted)
    assert (event.data.job_id, event.correlation_id, event.id) == (job_id, job_id, f"submit-{job_id}")
    why = (await cell.http.get(f"/v1/jobs/{job_id}/why")).json()
    assert "not read it yet" in why["text"]


async def test_a_submitted_job_is_found_by_its_name_at_once(cell: Cell) -> None:
    """`penstock submit -d --name nightly`, then `penstock wait nightly` on a busy machine: it was not found,
    since the placer and the tables were behind."""
    nightly = {**SPEC, "name": "nightly", "labels": {"sweep": "a=b"}}
    job_id = (await cell.http.post("/v1/jobs", json=nightly)).json()["job_id"]
    await cell.http.post("/v1/jobs", json={**SPEC, "owner": "bob"})

    async def found(**params: str) -> list[str]:
        answer = (await cell.http.get("/v1/jobs", params=params)).json()
        assert answer["total"] == len(answer["jobs"])
        return [job["job_id"] for job in answer["jobs"]]

    async def is_found() -> None:
        ways = (
            {"name": "nightly"},
            {"owner": "ana"},
            {"label": "sweep=a=b"},
            {"prefix": job_id[:20]},
            {"limit": "1", "owner": "ana"},
        )
        for way in ways:
            assert await found(**way) == [job_id], way
        assert await found(name="nightly", label="sweep=c") == await found(status="running") == []
        assert len(await found()) == 2

    await is_found()  # acknowledged
    connection = await asyncpg.connect(cell.dsn)
    async with connection.transaction():
        await connection.execute(f"LOCK TABLE {schema_of('default')}.jobs IN SHARE MODE")
        for event in await cell.written(Topic.JOBS):
            cell.placer.feed(event.data, event_id=event.id)
        await cell.tell()

        async def taken_in() -> bool:
            return bool((await cell.http.get("/v1/status")).json()["seq"] >= len(cell.placer.values))

        await await_until(taken_in, "the gateway's copy of the ledger")
        await is_found()  # taken in, and not yet in the tables
    await connection.close()
    await cell.caught_up()
    await is_found()
    refused = (await cell.http.post("/v1/jobs", json={**SPEC, "name": "refused"})).json()["job_id"]
    assert await found(name="refused") == [refused]
    cell.placer.feed(JobSubmitted(job_id=job_id, spec=event.data.spec), event_id=f"submit-{refused}")
    await cell.tell()
    await cell.caught_up()
    assert await found(name="refused") == [], "the placer has not taken it in"


async def test_the_same_key_and_job_give_the_same_job(cell: Cell) -> None:
    """A pipeline step is repeated after a network error: 200, the same job, one event."""
    key = {"Idempotency-Key": "build-17"}
    first = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
    again = await cell.http.post("/v1/jobs", json=dict(reversed(SPEC.items())), headers=key)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json() == again.json()
    assert len(await cell.written(Topic.JOBS)) == 1


async def submitted_and_cancelled(cell: Cell, key: Mapping[str, str]) -> str:
    """A job of its own, which the placer has taken in and ended; its id."""
    job_id = str((await cell.http.post("/v1/jobs", json=SPEC, headers=key)).json()["job_id"])
    [event] = await cell.written(Topic.JOBS)
    cell.placer.feed(event.data, event.id)
    cell.placer.feed(JobCancelRequested(job_id=job_id))
    return job_id


async def test_a_key_that_was_never_marked_keeps_its_promise_when_the_ledger_has_forgotten_the_job(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway died between log and mark. The client repeats after 100,000 other jobs (here: one) have
    ended."""
    monkeypatch.setattr("penstock.ledger.fold.evolve_jobs.MAX_ENDED_REMEMBERED", 1)
    key = {"Idempotency-Key": "build-18"}
    cell.placer.join(node_spec("n0"))
    job_id = await submitted_and_cancelled(cell, key)
    cell.placer.run(["other"])
    assert job_id not in cell.placer.state.ended
    await cell.tell()
    await cell.caught_up()
    keys = f"{schema_of('default')}_gateway.idempotency"
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute(f"UPDATE {keys} SET appended = false")
    again = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
    assert (again.status_code, again.json()["job_id"]) == (200, job_id)
    assert len(await cell.written(Topic.JOBS)) == 1, "it would run a second time"
    monkeypatch.setattr("penstock_services.gateway.shell.store.PRUNE_EVERY_KEYS", 1)
    await connection.execute(f"UPDATE {keys} SET created_at = created_at - make_interval(days => 31)")
    await cell.http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "build-19"})
    left = [row["key"] for row in await connection.fetch(f"SELECT key FROM {keys}")]
    assert left == ["build-19"], "a gateway that runs for years forgets keys, too"
    await connection.close()


async def test_a_strict_submission_is_not_judged_again_once_its_job_has_ended(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline step is repeated a day later: the job was submitted, so it is answered so, and not
    refused."""
    monkeypatch.setattr("penstock_services.gateway.shell.replica.follower.MAX_ENDED_ROWS", 0)
    key = {"Idempotency-Key": "build-20"}
    job_id = await submitted_and_cancelled(cell, key)
    await cell.tell()
    await cell.caught_up()
    again = await cell.http.post("/v1/jobs?strict_deadline=true", json=SPEC, headers=key)
    assert (again.status_code, again.json()["job_id"]) == (200, job_id)
    refused = await cell.http.post("/v1/jobs?strict_deadline=true", json=SPEC)
    assert refused.status_code == 400
    assert "give a deadline, or qos prior or normal" in refused.json()["detail"]


async def test_the_same_key_and_another_job_conflict(cell: Cell) -> None:
    """Two steps share a key by mistake: the second learns it, with both digests."""
    key = {"Idempotency-Key": "build-17"}
    first = (await cell.http.post("/v1/jobs", json=SPEC, headers=key)).json()
    body = problem(await cell.http.post("/v1/jobs", json={**SPEC, "name": "b"}, headers=key), 409)
    assert body["type"] == "urn:penstock:problem:key_conflict"
    assert first["job_id"] in body["detail"]
    digests = [word.strip(".,;") for word in body["detail"].split() if len(word.strip(".,;")) == 64]
    assert len(set(digests)) == 2
    assert len(await cell.written(Topic.JOBS)) == 1


async def test_twenty_at_once_with_one_key_make_one_job(cell: Cell) -> None:
    """A runner's retry logic goes wild."""
    key = {"Idempotency-Key": "storm"}
    found = await asyncio.gather(*(cell.http.post("/v1/jobs", json=SPEC, headers=key) for _ in range(20)))
    assert sorted(answer.status_code for answer in found) == [200] * 19 + [202]
    assert len({answer.json()["job_id"] for answer in found}) == 1
    assert len(await cell.written(Topic.JOBS)) == 1


async def test_a_job_file_in_yaml(cell: Cell) -> None:
    """`curl --data-binary @job.yaml`: human units are understood, aliases are not."""
    yaml = {"content-type": "application/yaml"}
    text = "command: [python, t.py]\nresources:\n  host_memory: 2GiB\n"
    assert (await cell.http.post("/v1/jobs", content=text, headers=yaml)).status_code == 202
    (event,) = await cell.written(Topic.JOBS)
    assert isinstance(event.data, JobSubmitted)
    assert event.data.spec.resources.host_memory_mib == 2_048
    body = problem(await cell.http.post("/v1/jobs", content="command: [x]\nresorces: {}", headers=yaml), 400)
    assert body["errors"][0] == {
        "field": "resorces",
        "message": "is not known",
        "remedy": "did you mean `resources`?",
    }
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\ncommand: [*b, *b]\n"
    assert "aliases" in problem(await cell.http.post("/v1/jobs", content=bomb, headers=yaml), 400)["detail"]
    twice = "command: [x]\nworkers: 1\nworkers: 2\n"
    detail = problem(await cell.http.post("/v1/jobs", content=twice, headers=yaml), 400)["detail"]
    assert "`workers`" in detail
    assert "line 2" in detail
    assert "line 3" in detail
    twice = '{"command": ["x"], "env": {"A": "1", "A": "2"}}'
    error = {"field": "A", "message": "stands twice in an object", "remedy": "remove one of them"}
    for path, body, kind in (
        ("/v1/jobs", twice, "application/json"),
        ("/v1/events", '{"data": ' + twice + "}", "application/cloudevents+json"),
    ):
        answer = await cell.http.post(path, content=body, headers={"content-type": kind})
        assert problem(answer, 400)["errors"] == [error]
    for junk in (
        "[" * 30_000,
        "command: [\x00]",
        "- a\n- b\n",
        ": :",
        "{a: b",
        "!!python/object:os.system x",
    ):
        problem(await cell.http.post("/v1/jobs", content=junk, headers=yaml), 400)


async def test_a_wrong_job_gets_every_problem_at_once(cell: Cell) -> None:
    wrong = {"workers": 0, "resources": {"gpus": -1}, "weight": 3}
    body = problem(await cell.http.post("/v1/jobs", json=wrong), 400)
    assert {error["field"] for error in body["errors"]} == {
        "command",
        "workers",
        "resources.gpus",
        "weight",
    }
    assert all(error["message"] and error["remedy"] for error in body["errors"])
    for junk in (b"", b"null", b"[]", b"{", b'{"command": NaN}', b"\xff\xfe", b"[" * 50_000):
        problem(await cell.http.post("/v1/jobs", content=junk, headers=JSON), 400)
    problem(await cell.http.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "x" * 257}), 400)
    problem(await cell.http.post("/v1/jobs", content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert await cell.written(Topic.JOBS) == []


async def test_what_is_too_large_is_refused_before_it_is_written(cell: Cell) -> None:
    """A notebook's whole text as an argument: 413, at the bound of one event and at the bound of a body."""
    control = "\u0001"  # one byte in memory, six in JSON
    large = {
        "command": ["x", control * 8_000, control * 8_000],
        "env": {"E": control * 16_000},
        "labels": {"L": control * 16_000},
    }
    body = problem(await cell.http.post("/v1/jobs", json=large), 413)
    assert "bound is 262144" in body["detail"]
    large["labels"] = {}
    assert (await cell.http.post("/v1/jobs", json=large)).status_code == 202
    problem(await cell.http.post("/v1/jobs", content=b" " * (2 << 20), headers=JSON), 413)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65_536

    problem(await cell.http.post("/v1/jobs", content=endless(), headers=JSON), 413)


# --------------------------------------------------------------------------------- trouble in the log


async def test_a_stalled_log_gives_429_and_never_a_false_202(dsn: str) -> None:
    """The disk hangs: what fits the bound waits, the rest is asked to come again; afterwards 202s equal
    records."""
    async with running(dsn, max_in_flight=5) as cell:
        cell.log.gate.clear()
        posts = [asyncio.create_task(cell.http.post("/v1/jobs", json=SPEC)) for _ in range(12)]
        await await_until(
            lambda: sum(post.done() for post in posts) >= 7, "seven answers while the log stands still"
        )
        late = await cell.http.post(
            "/v1/jobs", json=SPEC
        )  # there is still no room for it: the other five wait
        refused, waiting = ([post for post in posts if post.done() == done] for done in (True, False))
        assert (len(refused), len(waiting)) == (7, 5)
        for answer in (late, *(post.result() for post in refused)):
            assert problem(answer, 429)["type"] == "urn:penstock:problem:overloaded"
            assert answer.headers["retry-after"] == "1"
        cell.log.gate.set()
        assert [(await post).status_code for post in waiting] == [202] * 5
        assert len(await cell.written(Topic.JOBS)) == 5
        assert (await cell.http.post("/v1/jobs", json=SPEC)).status_code == 202


async def test_a_log_that_does_not_answer_gives_503(dsn: str) -> None:
    """The outcome is unknown and reported as such; the same key again, and there is one job."""
    async with running(dsn, answer_within_s=0.2) as cell:
        cell.log.gate.clear()
        key = {"Idempotency-Key": "again"}
        slow = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
        assert "same Idempotency-Key" in problem(slow, 503)["detail"]
        assert slow.headers["retry-after"] == "2"
        cell.log.gate.set()

        async def repeated() -> httpx.Response | None:
            found = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
            return (
                None if found.status_code == 503 else found
            )  # the log answers later than this gateway waits

        again = await await_until(repeated, "an answer of the log")
        assert again.status_code == 200
        events = await cell.written(Topic.JOBS)
        assert len({event.id for event in events}) == 1
        for event in events:
            cell.placer.feed(event.data, event.id)
        assert list(cell.placer.replica.state.jobs) == [again.json()["job_id"]]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AppendFailed("the disk is full"), 503),
        (LogError("the broker is away"), 503),
        (NotAllowed("User:gateway"), 403),
        (TooLarge("1 MB"), 413),
    ],
)
async def test_a_failing_log_never_gives_202(cell: Cell, error: LogError, status: int) -> None:
    """Each way in which the log refuses has its own answer; afterwards all is well again."""
    cell.log.error = error
    answer = await cell.http.post("/v1/jobs", json=SPEC)
    assert str(error) in problem(answer, status)["detail"]
    assert ("retry-after" in answer.headers) == (status == 503)
    cell.log.error = None
    assert (await cell.http.post("/v1/jobs", json=SPEC)).status_code == 202
    assert len(await cell.written(Topic.JOBS)) == 1


@pytest.mark.parametrize(
    ("failpoint", "records"), [("gateway.before_append", 1), ("gateway.after_append", 2)]
)
async def test_killed_around_the_append_it_still_makes_one_job(
    dsn: str, failpoint: str, records: int
) -> None:
    """The gateway dies between log and answer; the client repeats at its successor: one job, whatever was
    written."""
    key, job_ids = {"Idempotency-Key": "once"}, []
    async with httpx.AsyncClient(timeout=None) as http:
        async with gateway_process(dsn, f"{failpoint}:1") as process:
            url = f"http://127.0.0.1:{port_of(process.pid)}/v1/jobs"
            with pytest.raises(httpx.HTTPError):
                await http.post(url, json=SPEC, headers=key)
            assert await process.wait() == -signal.SIGKILL
        async with gateway_process(dsn) as successor:
            url = f"http://127.0.0.1:{port_of(successor.pid)}/v1/jobs"
            for _ in range(2):
                answer = await http.post(url, json=SPEC, headers=key)
                assert answer.status_code == 200
                job_ids.append(answer.json()["job_id"])
    assert len(set(job_ids)) == 1
    log = await EmbeddedLog(dsn, "test").start()
    cell = Cell(Faulty(log), HandPlacer(), http, "", dsn)
    events = await cell.written(Topic.JOBS)
    await log.close()
    assert len(events) == records
    for event in events:
        cell.placer.feed(event.data, event.id)
    assert list(cell.placer.replica.state.jobs) == job_ids[:1]


@asynccontextmanager
async def gateway_process(dsn: str, failpoint: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {
        **os.environ,
        "PENSTOCK_DSN": dsn,
        "PENSTOCK_LOG": dsn,
        "PENSTOCK_FAILPOINT": failpoint,
        "PENSTOCK_GATEWAY_BIND": "127.0.0.1:0",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock_services.gateway", env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        assert await process.wait() in (0, -signal.SIGKILL)


# ------------------------------------------------------------------------------------------- events


async def test_cloudevents_in_every_mode(cell: Cell) -> None:
    """A CI system and a cloud bus hand in events as they are used to; sending one twice is harmless."""
    data = {"job_id": "ci-1", "spec": SPEC}
    whole = {
        "specversion": "1.0",
        "id": "e1",
        "source": "/ci",
        "type": "penstock.job.submitted.v1",
        "data": data,
    }
    structured = {"content-type": "application/cloudevents+json; charset=utf-8"}
    first = await cell.http.post("/v1/events", content=json.dumps(whole), headers=structured)
    assert (first.status_code, first.json()) == (202, {"ids": ["e1"]})
    again = await cell.http.post("/v1/events", content=json.dumps(whole), headers=structured)
    assert again.status_code == 202
    binary = {
        "content-type": "application/json",
        "ce-specversion": "1.0",
        "ce-id": "e2",
        "ce-source": "/ci",
        "ce-type": "penstock.job.cancel_requested.v1",
        "ce-time": "2030-01-01T00:00:00Z",
    }
    cancelled = await cell.http.post("/v1/events", json={"job_id": "ci-1"}, headers=binary)
    assert cancelled.status_code == 202
    both = [{**whole, "id": f"b{n}", "data": {"job_id": f"ci-b{n}", "spec": SPEC}} for n in range(3)]
    batch = {"content-type": "application/cloudevents-batch+json"}
    assert (await cell.http.post("/v1/events", content=json.dumps(both), headers=batch)).json() == {
        "ids": ["b0", "b1", "b2"]
    }
    events = await cell.written(Topic.JOBS)
    assert [event.id for event in events] == ["e1", "e1", "e2", "b0", "b1", "b2"]
    assert isinstance(events[2].data, JobCancelRequested)
    for event in events:
        cell.placer.feed(event.data, event.id)
    assert sorted(cell.placer.replica.state.jobs) == ["ci-b0", "ci-b1", "ci-b2"]
    assert (await cell.http.get("/v1/jobs/ci-b1")).json()["status"] == "submitted"


async def test_a_wrong_event_gets_every_problem_at_once(cell: Cell) -> None:
    structured = {"content-type": "application/cloudevents+json"}

    async def refused(event: object, status: int = 400) -> dict[str, Any]:
        return problem(
            await cell.http.post("/v1/events", content=json.dumps(event), headers=structured), status
        )

    body = await refused({"specversion": "0.3", "type": "penstock.job.submitted.v1", "data": {"x": 1}})
    assert {error["field"] for error in body["errors"]} == {
        "id",
        "source",
        "specversion",
        "data.job_id",
        "data.spec",
        "data.x",
    }
    ok = {"specversion": "1.0", "id": "e", "source": "/t"}
    assert (
        "not accepted here"
        in (await refused({**ok, "type": "penstock.ledger.record.v1", "data": {}}))["detail"]
    )
    assert (
        "not accepted here"
        in (await refused({**ok, "type": "penstock.placement.decided.v1", "data": {}}))["detail"]
    )
    await refused({**ok, "type": "penstock.job.submitted.v9", "data": {}})
    await refused({**ok, "type": "com.example.other", "data": {}})
    await refused({**ok, "type": 7, "data": {}})
    await refused([])
    large = {
        **ok,
        "type": "penstock.job.submitted.v1",
        "data": {"job_id": "j", "spec": {**SPEC, "x": "y" * 263_000}},
    }
    await refused(large, 413)
    problem(await cell.http.post("/v1/events", content=b"\xff", headers=structured), 400)
    problem(await cell.http.post("/v1/events", json={"job_id": "j"}), 400)
    problem(await cell.http.post("/v1/events", content=b"x", headers={"content-type": "text/plain"}), 415)
    assert await cell.written(Topic.JOBS) == []
