"""The gateway over real HTTP, on a real Postgres and the embedded log: what it promises, and how it says no."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio

from penstock.events.doors import JobCancelRequested, JobSubmitted
from penstock.events.envelope import Envelope, from_wire
from penstock.events.topics import CELL_TOPICS, Topic
from penstock.gateway.shell import service as gateway_service
from penstock.gateway.shell.options import Options
from penstock.kernel.embedded_log import EmbeddedLog
from penstock.kernel.errors import AppendFailed, ConfigurationError
from penstock.kernel.log import Log, Message, Partition, Reader
from penstock.kernel.settings import Settings
from penstock.kernel.snapshots import save_snapshot
from penstock.kernel.task_logs import log_path
from penstock.ledger.replica import Replica
from penstock.projector.shell import service as projector_service
from penstock.testing.hand_placer import HandPlacer, node_spec

pytestmark = pytest.mark.postgres
WITHIN_S = 20.0
JSON = {"content-type": "application/json"}
SPEC = {"command": ["true"], "name": "digits", "owner": "ana"}


@dataclass
class Faulty:
    """A log whose appends can be held up, or fail, as when its disk or broker is in trouble."""

    inner: Log
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    failing: bool = False

    def __post_init__(self) -> None:
        self.gate.set()

    async def start(self) -> "Faulty":
        return self

    async def create(self, topics: Mapping[str, int]) -> None:
        await self.inner.create(topics)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        await self.gate.wait()
        if self.failing:
            raise AppendFailed("the disk is full")
        return await self.inner.append(messages)

    def reader(self, start: Mapping[Partition, int], *, pace_ms: int = 0) -> Reader:
        return self.inner.reader(start, pace_ms=pace_ms)

    async def end_offsets(self, partitions: Any) -> dict[Partition, int]:
        return await self.inner.end_offsets(partitions)

    async def close(self) -> None:
        return None


@dataclass
class Cell:
    """A gateway and a projector that run, a placer driven by hand, and a client."""

    log: Faulty
    placer: HandPlacer
    http: httpx.AsyncClient
    url: str
    dsn: str

    async def tell(self) -> None:
        """The placer's records so far, in the log."""
        await self.placer.send(self.log.inner)

    async def written(self, topic: Topic) -> list[Envelope]:
        """Everything on an input topic."""
        place = Partition(topic, 0)
        reader = self.log.inner.reader({place: 0})
        records = await reader.read(timeout_ms=0)
        await reader.close()
        return [from_wire(record.headers, record.value, topic) for record in records]


@asynccontextmanager
async def running(dsn: str, **changes: Any) -> AsyncIterator[Cell]:
    inner = await EmbeddedLog(dsn, "test").start()
    await inner.create(dict.fromkeys(CELL_TOPICS, 1))
    log, settings = Faulty(inner), Settings(log_url=dsn, dsn=dsn)
    options = Options(**{"host": "127.0.0.1", "port": 0, **changes})
    listener = gateway_service.listening_socket(options)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    stop, ready = asyncio.Event(), [asyncio.Event(), asyncio.Event()]
    tasks = [
        asyncio.create_task(projector_service.run(settings, stop, log=inner, ready=ready[0])),
        asyncio.create_task(
            gateway_service.serve(settings, options, stop, log=log, ready=ready[1], listener=listener)
        ),
    ]
    try:
        async with asyncio.timeout(WITHIN_S):
            for event in ready:
                await event.wait()
        async with httpx.AsyncClient(base_url=url, timeout=WITHIN_S) as http:
            yield Cell(log, HandPlacer(), http, url, dsn)
    finally:
        stop.set()
        log.gate.set()
        await asyncio.wait_for(asyncio.gather(*tasks), WITHIN_S)
        await inner.close()


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"type", "title", "status", "detail", "errors"}
    assert body["status"] == status
    return body


# ------------------------------------------------------------------------------------------- submit


async def test_a_submitted_job_is_in_the_log_and_can_be_seen_at_once(cell: Cell) -> None:
    """CI submits and asks in the next breath, while no placer is up: the job is there, waiting to be taken in."""
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
    assert "not taken it in" in why["text"]


async def test_the_same_key_and_job_give_the_same_job(cell: Cell) -> None:
    """A pipeline step is repeated after a network error: 200, the same job, one event."""
    key = {"Idempotency-Key": "build-17"}
    first = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
    again = await cell.http.post("/v1/jobs", json=dict(reversed(SPEC.items())), headers=key)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json() == again.json()
    assert len(await cell.written(Topic.JOBS)) == 1


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
    for junk in (
        "[" * 30_000,
        "command: [\x00]",
        "- a\n- b\n",
        ": :",
        "{a: b",
        "!!python/object:os.system x",
    ):
        problem(await cell.http.post("/v1/jobs", content=junk, headers=yaml), 400)


async def test_a_wrong_job_is_told_everything_at_once(cell: Cell) -> None:
    wrong = {"workers": 0, "resources": {"gpus": -1}, "priority": 3}
    body = problem(await cell.http.post("/v1/jobs", json=wrong), 400)
    assert {error["field"] for error in body["errors"]} == {
        "command",
        "workers",
        "resources.gpus",
        "priority",
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
        "command": ["x" * 8_000, "y" * 8_000],
        "env": {"E": control * 7_000},
        "labels": {"L": control * 8_000},
    }
    body = problem(await cell.http.post("/v1/jobs", json=large), 413)
    assert "bound is 65536" in body["detail"]
    large["labels"] = {}
    assert (await cell.http.post("/v1/jobs", json=large)).status_code == 202
    problem(await cell.http.post("/v1/jobs", content=b" " * (2 << 20), headers=JSON), 413)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * 65_536

    problem(await cell.http.post("/v1/jobs", content=endless(), headers=JSON), 413)


# --------------------------------------------------------------------------------- trouble in the log


async def test_a_stalled_log_gives_429_and_never_a_false_202(dsn: str) -> None:
    """The disk hangs: what fits the bound waits, the rest is told to come again; afterwards 202s equal records."""
    async with running(dsn, max_in_flight=5) as cell:
        cell.log.gate.clear()
        posts = [asyncio.create_task(cell.http.post("/v1/jobs", json=SPEC)) for _ in range(12)]
        done, waiting = await asyncio.wait(posts, timeout=1.0)
        assert (len(done), len(waiting)) == (7, 5)
        for post in done:
            assert problem(post.result(), 429)["type"] == "urn:penstock:problem:overloaded"
            assert post.result().headers["retry-after"] == "1"
        cell.log.gate.set()
        assert [(await post).status_code for post in waiting] == [202] * 5
        assert len(await cell.written(Topic.JOBS)) == 5
        assert (await cell.http.post("/v1/jobs", json=SPEC)).status_code == 202


async def test_a_log_that_does_not_answer_gives_503(dsn: str) -> None:
    """The outcome is unknown and said to be; the same key again, and there is one job."""
    async with running(dsn, answer_within_s=0.2) as cell:
        cell.log.gate.clear()
        key = {"Idempotency-Key": "again"}
        slow = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
        assert "same Idempotency-Key" in problem(slow, 503)["detail"]
        assert slow.headers["retry-after"] == "2"
        cell.log.gate.set()
        again = await cell.http.post("/v1/jobs", json=SPEC, headers=key)
        assert again.status_code == 200
        events = await cell.written(Topic.JOBS)
        assert len({event.id for event in events}) == 1
        for event in events:
            cell.placer.feed(event.data, event.id)
        assert list(cell.placer.replica.state.jobs) == [again.json()["job_id"]]


async def test_a_failing_log_gives_503(cell: Cell) -> None:
    cell.log.failing = True
    body = problem(await cell.http.post("/v1/jobs", json=SPEC), 503)
    assert "disk is full" in body["detail"]
    cell.log.failing = False
    assert (await cell.http.post("/v1/jobs", json=SPEC)).status_code == 202


@pytest.mark.parametrize(
    ("failpoint", "records"), [("gateway.before_append", 1), ("gateway.after_append", 2)]
)
async def test_killed_around_the_append_it_still_makes_one_job(
    dsn: str, failpoint: str, records: int
) -> None:
    """The gateway dies between log and answer; the client repeats at its successor: one job, whatever was written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key, job_ids = {"Idempotency-Key": "once"}, []
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=WITHIN_S) as http:
        async with gateway_process(dsn, port, f"{failpoint}:1") as process:
            with pytest.raises(httpx.HTTPError):
                await http.post("/v1/jobs", json=SPEC, headers=key)
            assert await process.wait() == -signal.SIGKILL
        async with gateway_process(dsn, port):
            for _ in range(2):
                answer = await http.post("/v1/jobs", json=SPEC, headers=key)
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
async def gateway_process(
    dsn: str, port: int, failpoint: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = {
        **os.environ,
        "PENSTOCK_DSN": dsn,
        "PENSTOCK_LOG": dsn,
        "PENSTOCK_FAILPOINT": failpoint,
        "PENSTOCK_GATEWAY_BIND": f"127.0.0.1:{port}",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock.gateway", env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            assert (await process.stdout.readline()) == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        assert await asyncio.wait_for(process.wait(), WITHIN_S) in (0, -signal.SIGKILL)


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


async def test_a_wrong_event_is_told_everything_at_once(cell: Cell) -> None:
    structured = {"content-type": "application/cloudevents+json"}

    async def refused(event: object, status: int = 400) -> dict[str, Any]:
        return problem(
            await cell.http.post("/v1/events", content=json.dumps(event), headers=structured), status
        )

    body = await refused({"specversion": "0.3", "type": "penstock.job.submitted.v1", "data": {"x": 1}})
    assert {error["field"] for error in body["errors"]} == {
        "id", "source", "specversion", "data.job_id", "data.spec", "data.x",
    }  # fmt: skip
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
        "data": {"job_id": "j", "spec": {**SPEC, "x": "y" * 66_000}},
    }
    await refused(large, 413)
    problem(await cell.http.post("/v1/events", content=b"\xff", headers=structured), 400)
    problem(await cell.http.post("/v1/events", json={"job_id": "j"}), 400)
    problem(await cell.http.post("/v1/events", content=b"x", headers={"content-type": "text/plain"}), 415)
    assert await cell.written(Topic.JOBS) == []


# ------------------------------------------------------------------------------------------- looking


async def test_looking_at_a_cell(cell: Cell) -> None:
    """One job runs, one waits, one can never run, one has ended: every view tells the same story."""
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    placer.run(["done"])
    placer.submit("runs")
    placer.start("runs")
    placer.submit("waits", gpus=2)
    placer.submit("never", gpus=9)
    await cell.tell()
    async with asyncio.timeout(WITHIN_S):
        while (status := (await cell.http.get("/v1/status")).json())["seq"] < len(placer.values):
            await asyncio.sleep(0.01)
    assert status["jobs"] == {"running": 1, "queued": 2}
    get = cell.http.get
    listed = (await get("/v1/jobs")).json()
    assert [job["job_id"] for job in listed["jobs"]] == ["never", "waits", "runs", "done"]
    page = (await get("/v1/jobs", params={"limit": 3})).json()
    rest = (await get("/v1/jobs", params={"limit": 3, "cursor": page["next_cursor"]})).json()
    assert [job["job_id"] for job in rest["jobs"]] == ["done"]
    assert [j["job_id"] for j in (await get("/v1/jobs", params={"status": "running"})).json()["jobs"]] == [
        "runs"
    ]
    assert (await get("/v1/jobs", params={"owner": "nobody"})).json()["jobs"] == []
    assert (await get("/v1/jobs/done")).json()["outcome"] == "succeeded"
    (task,) = (await get("/v1/jobs/runs/tasks")).json()["tasks"]
    assert (task["status"], task["node_id"]) == ("running", "n0")
    events = (await get("/v1/jobs/done/events")).json()["events"]
    assert (events[0]["type"], events[-1]["type"]) == ("penstock.job.submitted", "penstock.job.ended")
    node = (await get("/v1/nodes/n0")).json()
    assert (node["gpus_free"], [gpu["job_id"] for gpu in node["gpu_list"]]) == (1, ["runs", None])
    assert [gpu["gpu"] for gpu in (await get("/v1/gpus")).json()["gpus"]] == [0, 1]
    queue = (await get("/v1/queue")).json()["jobs"]
    assert [(job["job_id"], job["reason"]) for job in queue] == [
        ("waits", "gpus_busy"),
        ("never", "never_fits_gpus"),
    ]
    decisions = (await get("/v1/decisions", params={"job": "runs"})).json()["decisions"]
    assert [row["kind"] for row in decisions] == ["penstock.placement.decided"]
    one = (await get(f"/v1/decisions/{decisions[0]['seq']}")).json()["decisions"]
    assert one == decisions
    why = (await get("/v1/jobs/runs/why")).json()
    assert (why["status"], why["placement"]["candidates"][0]["nodes"]) == ("running", ["n0"])
    ended = (await get("/v1/jobs/done/why")).json()
    assert (ended["status"], ended["placement"]["tasks"][0]["node_id"]) == ("succeeded", "n0")
    for path, status_code in [
        ("/v1/jobs/nobody", 404), ("/v1/jobs/nobody/tasks", 404), ("/v1/nodes/n9", 404), ("/v1/decisions/2", 404),
        ("/v1/decisions/x", 400), ("/v1/jobs?limit=0", 400), ("/v1/jobs?status=odd", 400), ("/v1/nothing", 404),
        ("/v1/jobs/runs/why?at=x", 400), ("/v1/jobs/runs/why?at=999", 404), ("/v1/jobs/runs/why?at=1", 404),
    ]:  # fmt: skip
        problem(await get(path), status_code)
    problem(await cell.http.put("/v1/jobs"), 405)


async def test_why_at_any_past_record(cell: Cell) -> None:
    """Next morning: why did it wait at that moment? The answer is what it would have been then, snapshot or not."""
    placer = cell.placer
    placer.join(node_spec("n0", 1))
    placer.submit("first")
    placer.submit("second")
    waited_at = len(placer.values)
    placer.start("first")
    placer.finish("first")
    placed_at = len(placer.values)
    placer.start("second")
    await cell.tell()

    async def why(at: int) -> dict[str, Any]:
        found: dict[str, Any] = (await cell.http.get(f"/v1/jobs/second/why?at={at}")).json()
        return found

    async with asyncio.timeout(WITHIN_S):
        while (await cell.http.get("/v1/status")).json()["seq"] < len(placer.values):
            await asyncio.sleep(0.01)
    answers = {at: await why(at) for at in (waited_at, placed_at)}
    assert (answers[waited_at]["reason"], answers[waited_at]["seq"]) == ("gpus_busy", waited_at)
    assert answers[waited_at]["placement"] is None
    assert (answers[placed_at]["status"], answers[placed_at]["reason"]) == ("launching", None)
    assert answers[placed_at]["placement"]["seq"] == placed_at
    replica, connection = Replica(), await asyncpg.connect(cell.dsn)
    for offset, value in enumerate(placer.values[:waited_at]):
        replica.take(value, offset)
    await save_snapshot(connection, "default", replica)
    await connection.close()
    assert {at: await why(at) for at in answers} == answers


async def test_cancel(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 1))
    cell.placer.run(["done"])
    cell.placer.submit("runs")
    await cell.tell()
    async with asyncio.timeout(WITHIN_S):
        while (await cell.http.get("/v1/jobs/runs")).status_code == 404:
            await asyncio.sleep(0.01)
    assert (await cell.http.delete("/v1/jobs/runs")).status_code == 202
    assert (await cell.http.post("/v1/jobs/runs/cancel", json={"reason": "wrong data"})).status_code == 202
    events = await cell.written(Topic.JOBS)
    assert [getattr(event.data, "reason", "") for event in events] == ["asked by the user", "wrong data"]
    problem(await cell.http.delete("/v1/jobs/nobody"), 404)
    assert "succeeded" in problem(await cell.http.delete("/v1/jobs/done"), 409)["detail"]
    problem(await cell.http.post("/v1/jobs/runs/cancel", json={"reason": 1, "x": 2}), 400)
    problem(await cell.http.post("/v1/jobs/runs/cancel", json=[1]), 400)


# ------------------------------------------------------------------------------------------- stream


async def frames(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """(id, data) of each event."""
    event_id = ""
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: "):
            yield event_id, json.loads(line[6:])


async def test_a_stream_resumes_without_gap_or_duplicate(cell: Cell) -> None:
    """A browser tab loses its connection again and again while jobs run: what it has seen in the end is the ledger."""
    seen: list[str] = []
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    await cell.tell()

    async def work() -> None:
        for number in range(12):
            placer.run([f"job-{number}"])
            await cell.tell()
            await asyncio.sleep(0.01)

    working = asyncio.create_task(work())
    last = "0"
    async with asyncio.timeout(WITHIN_S):
        while not seen or seen[-1].split(".")[0] != "50":
            async with cell.http.stream("GET", "/v1/stream", headers={"Last-Event-ID": last}) as response:
                assert response.headers["content-type"].startswith("text/event-stream")
                async for last, data in frames(response):
                    assert last == f"{data['seq']}.{data['n']}"
                    seen.append(last)
                    if len(seen) % 9 == 0 or data["seq"] == 50:
                        break
    await working
    assert len(placer.values) == 50
    connection = await asyncpg.connect(cell.dsn)
    rows = await connection.fetch("SELECT seq || '.' || n AS id FROM penstock.events ORDER BY seq, n")
    await connection.close()
    assert seen[: len(rows)] == [row["id"] for row in rows][: len(seen)]
    assert len(rows) - len(seen) < 5  # it stopped reading at the first event of the last record


async def test_a_stream_starts_now_and_filters(cell: Cell) -> None:
    """`watch JOB`: only its events; without an id, only what happens from now on."""
    cell.placer.join(node_spec("n0", 2))
    await cell.tell()
    await asyncio.sleep(0.2)
    async with cell.http.stream("GET", "/v1/stream", params={"job": "b"}) as response:
        lines = frames(response)
        cell.placer.submit("a")
        cell.placer.submit("b")
        await cell.tell()
        async with asyncio.timeout(WITHIN_S):
            found = [await anext(lines) for _ in range(3)]
    assert {data["job_id"] for _, data in found} == {"b"}
    async with cell.http.stream("GET", "/v1/stream") as response:
        lines = frames(response)
        cell.placer.submit("c")
        await cell.tell()
        async with asyncio.timeout(WITHIN_S):
            assert (await anext(lines))[1]["job_id"] == "c"


async def test_a_place_in_the_stream_must_exist(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 2), node_spec("n1", 2), node_spec("n2", 2))
    await cell.tell()
    async with asyncio.timeout(WITHIN_S):
        while (await cell.http.get("/v1/status")).json()["projected_seq"] < 4:
            await asyncio.sleep(0.01)
    for wrong in ("x", "-1", "1.2.3", "9" * 40, "99"):
        problem(await cell.http.get("/v1/stream", headers={"Last-Event-ID": wrong}), 400)
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute("DELETE FROM penstock.events WHERE seq < 4")
    await connection.close()
    body = problem(await cell.http.get("/v1/stream", headers={"Last-Event-ID": "1.0"}), 410)
    assert "before record 4" in body["detail"]


# --------------------------------------------------------------------------------------------- logs


async def test_logs_are_followed_to_the_exit(dsn: str, tmp_path: Path) -> None:
    """`logs -f` while the task prints: it gets every byte as it comes, and ends when the task has exited."""
    async with running(dsn, log_dir=tmp_path) as cell:
        cell.placer.join(node_spec("n0", 1))
        cell.placer.submit("j")
        cell.placer.start("j")
        await cell.tell()
        path = log_path(tmp_path, "j", "j.1.w0")
        async with asyncio.timeout(WITHIN_S):
            while (await cell.http.get("/v1/jobs/j")).status_code == 404:
                await asyncio.sleep(0.01)
            async with cell.http.stream("GET", "/v1/jobs/j/logs", params={"follow": 1}) as response:
                assert response.status_code == 200
                chunks = response.aiter_text()
                await asyncio.sleep(0.1)
                path.parent.mkdir(exist_ok=True)
                path.write_text("epoch 1\n")
                assert await anext(chunks) == "epoch 1\n"
                with path.open("a") as file:
                    file.write("epoch 2\n")
                assert await anext(chunks) == "epoch 2\n"
                with path.open("a") as file:
                    file.write("bye\n")
                cell.placer.finish("j")
                await cell.tell()
                assert "".join([chunk async for chunk in chunks]) == "bye\n"
        whole = await cell.http.get("/v1/jobs/j/logs", params={"task": "w0"})
        assert whole.text == "epoch 1\nepoch 2\nbye\n"
        assert (await cell.http.get("/v1/jobs/j/logs", params={"tail": 2})).text == "epoch 2\nbye\n"
        assert (
            await cell.http.get("/v1/jobs/j/logs", params={"tail": 9, "task": "j.1.w0"})
        ).text == whole.text
        secret = tmp_path.parent / "secret.log"
        secret.write_text("no")
        for name in ("../../secret", "..%2F..%2Fsecret", "w1", "/etc/passwd", "."):
            problem(await cell.http.get("/v1/jobs/j/logs", params={"task": name}), 404)
        problem(await cell.http.get("/v1/jobs/%2e%2e/logs"), 404)


async def test_without_a_log_folder_it_says_so(cell: Cell) -> None:
    job_id = (await cell.http.post("/v1/jobs", json=SPEC)).json()["job_id"]
    body = problem(await cell.http.get(f"/v1/jobs/{job_id}/logs"), 404)
    assert "PENSTOCK_LOG_DIR" in body["detail"]


# ---------------------------------------------------------------------------------------- who may come in


async def test_every_request_needs_a_token_where_tokens_are_set(dsn: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("first-token-0123456789\nsecond-token-0123456789\n")
    path.chmod(0o600)
    options = Options.from_env({"PENSTOCK_TOKEN_FILE": str(path), "PENSTOCK_GATEWAY_BIND": "0.0.0.0:1"})
    assert options.host == "0.0.0.0"
    async with running(dsn, tokens=options.tokens) as cell:
        for authorization in (
            None,
            "Bearer wrong-token-0123456789",
            "Basic first-token-0123456789",
            "Bearer",
        ):
            headers = {"authorization": authorization} if authorization else {}
            for path_ in ("/v1/jobs", "/v1/stream", "/openapi.json"):
                refused = await cell.http.get(path_, headers=headers)
                problem(refused, 401)
                assert refused.headers["www-authenticate"].startswith("Bearer")
        good = {"authorization": "Bearer second-token-0123456789"}
        assert (await cell.http.post("/v1/jobs", json=SPEC, headers=good)).status_code == 202
        assert (await cell.http.get("/healthz")).status_code == 200


async def test_a_web_page_of_another_site_cannot_submit(cell: Cell) -> None:
    """A page in the user's browser posts to 127.0.0.1, or has its name point there: what it submits would run."""
    evil = {"origin": "https://evil.example"}
    assert problem(await cell.http.post("/v1/jobs", json=SPEC, headers=evil), 403)["type"].endswith(
        "foreign_origin"
    )
    rebound = {"host": "evil.example:8742"}
    assert problem(await cell.http.get("/v1/jobs", headers=rebound), 403)["type"].endswith("foreign_host")
    own = {"origin": cell.url}
    assert (await cell.http.post("/v1/jobs", json=SPEC, headers=own)).status_code == 202


@pytest.mark.parametrize(
    ("mode", "text", "complaint"),
    [
        (0o644, "a-token-of-some-length\n", "chmod 600"),
        (0o600, "short\n", "at least 16"),
        (0o600, "\n", "1 to 64 tokens"),
    ],
)
def test_a_careless_token_file_is_refused(tmp_path: Path, mode: int, text: str, complaint: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=complaint):
        Options.from_env({"PENSTOCK_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("bind", ["0.0.0.0:8742", "[::]:8742", "10.0.0.1:80", "example.com:80"])
def test_it_binds_to_loopback_only_without_tokens(bind: str) -> None:
    """Whoever reaches the gateway runs commands: the whole network must not, by default."""
    with pytest.raises(ConfigurationError, match="PENSTOCK_TOKEN_FILE"):
        Options.from_env({"PENSTOCK_GATEWAY_BIND": bind})


@pytest.mark.parametrize("bind", ["8742", "127.0.0.1:x", "127.0.0.1:99999", ":1"])
def test_a_wrong_bind_is_named(bind: str) -> None:
    with pytest.raises(ConfigurationError, match="PENSTOCK_GATEWAY_BIND"):
        Options.from_env({"PENSTOCK_GATEWAY_BIND": bind})


def test_an_address_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="stop what listens there"):
            gateway_service.listening_socket(Options("127.0.0.1", taken.getsockname()[1]))


# ------------------------------------------------------------------------------------------ the rest


async def test_projections_are_verified_and_rebuilt_over_http(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 1))
    cell.placer.run(["a", "b"])
    await cell.tell()
    async with asyncio.timeout(WITHIN_S):
        while (await cell.http.get("/v1/status")).json()["projected_seq"] < len(cell.placer.values):
            await asyncio.sleep(0.01)
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute("UPDATE penstock.jobs SET owner = 'mallory' WHERE job_id = 'a'")
    await connection.close()
    found = (await cell.http.post("/v1/projections/verify")).json()
    assert (found["ok"], found["different"], found["differences"][0]["key"]) == (False, 1, "a")
    assert (await cell.http.post("/v1/projections/rebuild")).json()["ok"]
    assert (await cell.http.post("/v1/projections/verify")).json()["ok"]


async def test_the_openapi_document_is_whole(cell: Cell) -> None:
    """Client generators read it: every reference resolves, bodies have examples that the gateway itself accepts."""
    document = (await cell.http.get("/openapi.json")).json()
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "')[1:]}:
        found = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    submit = document["paths"]["/v1/jobs"]["post"]["requestBody"]["content"]
    for kind, part in submit.items():
        body = part["example"] if isinstance(part["example"], str) else json.dumps(part["example"])
        answer = await cell.http.post("/v1/jobs", content=body, headers={"content-type": kind})
        assert answer.status_code == 202, answer.text
    hand_in = document["paths"]["/v1/events"]["post"]["requestBody"]["content"]
    example = hand_in["application/cloudevents+json"]["example"]
    headers = {"content-type": "application/cloudevents+json"}
    assert (
        await cell.http.post("/v1/events", content=json.dumps(example), headers=headers)
    ).status_code == 202


async def test_a_gateway_starts_from_a_snapshot_and_goes_on(dsn: str) -> None:
    """A restart in the middle of the day: the replica is the same, and ended jobs are still known."""
    async with running(dsn) as cell:
        cell.placer.join(node_spec("n0", 1))
        cell.placer.run(["done"])
        cell.placer.submit("waits", gpus=2)
        await cell.tell()
        replica, connection = Replica(), await asyncpg.connect(dsn)
        for offset, value in enumerate(cell.placer.values[:4]):
            replica.take(value, offset)
        async with asyncio.timeout(WITHIN_S):
            while (await cell.http.get("/v1/status")).json()["projected_seq"] < len(cell.placer.values):
                await asyncio.sleep(0.01)
        await save_snapshot(connection, "default", replica)
        await connection.close()
        before = [(await cell.http.get(f"/v1/jobs/{job}")).json() for job in ("done", "waits")]
    async with running(dsn) as cell:
        after = [(await cell.http.get(f"/v1/jobs/{job}")).json() for job in ("done", "waits")]
        assert after == before
        assert (await cell.http.get("/readyz")).status_code == 200
