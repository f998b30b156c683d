"""Looking at a cell over real HTTP: jobs, reasons, the stream of events, logs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
import pytest_asyncio

from penstock.ledger.replica.replica import Replica
from penstock.log.archive import Archive, Writer
from penstock.log.archived import ArchivedLog
from penstock.log.port import Partition
from penstock.model.schema.topics import Topic
from penstock.runtime.following.snapshots import save_snapshot
from tests.support.cluster.hand_placer import MS_PER_INPUT, node_spec
from tests.support.gateway.gateway_cell import Cell, problem, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


# ------------------------------------------------------------------------------------------- looking


async def test_looking_at_a_cell(cell: Cell) -> None:
    """One job runs, one waits, one can never run, one has ended: all views agree."""
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    placer.run(["done"])
    placer.submit("runs")
    placer.start("runs")
    placer.submit("waits", gpus=2)
    placer.submit("never", gpus=9)
    await cell.tell()
    status = await cell.caught_up()
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
    assert (task["status"], task["node_id"], task["gpu_uuids"]) == ("running", "n0", ["n0-gpu-0"])
    events = (await get("/v1/jobs/done/events")).json()["events"]
    assert (events[0]["type"], events[-1]["type"]) == ("penstock.job.submitted", "penstock.job.ended")
    node = (await get("/v1/nodes/n0")).json()
    assert "serves no output; start its node-reporter with" in node["logs"]["problem"]
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
    assert [(task["gpus"], task["gpu_uuids"]) for task in why["placement"]["tasks"]] == [([0], ["n0-gpu-0"])]
    ended = (await get("/v1/jobs/done/why")).json()
    assert ended["placement"]["tasks"][0]["gpu_uuids"] == ["n0-gpu-0"]
    assert (ended["status"], ended["placement"]["tasks"][0]["node_id"]) == ("succeeded", "n0")
    for path, status_code in [
        ("/v1/jobs/nobody", 404),
        ("/v1/jobs/nobody/tasks", 404),
        ("/v1/nodes/n9", 404),
        ("/v1/decisions/2", 404),
        ("/v1/decisions/x", 400),
        ("/v1/jobs?limit=0", 400),
        ("/v1/jobs?status=odd", 400),
        ("/v1/nothing", 404),
        ("/v1/jobs/runs/why?at=x", 400),
        ("/v1/jobs/runs/why?at=999", 404),
        ("/v1/jobs/runs/why?at=1", 404),
    ]:
        problem(await get(path), status_code)
    problem(await cell.http.put("/v1/jobs"), 405)
    assert "left the tables" not in problem(await get("/v1/jobs/nobody"), 404)["detail"]
    tables = await asyncpg.connect(cell.dsn)
    await tables.execute("UPDATE penstock.positions SET forgotten_ms = 1767225600000")
    await tables.close()
    unknown = problem(await get("/v1/jobs/nobody"), 404)["detail"]
    assert "Jobs that ended up to 2026-01-01 have left the tables (PENSTOCK_ENDED_JOBS_DAYS)" in unknown
    assert "`penstock replay --decision nobody`" in unknown


async def test_why_at_any_past_record(cell: Cell) -> None:
    """Next morning: why did it wait at that moment? The answer is what it would have been then, snapshot or
    not."""
    placer = cell.placer
    placer.join(node_spec("n0", 1))
    placer.submit("first")
    placer.submit("second")
    waited_at, waited_ms = len(placer.values), placer.now_ms
    placer.start("first")
    placer.finish("first")
    placed_at, placed_ms = len(placer.values), placer.now_ms
    placer.start("second")
    await cell.tell()

    async def why(at: int) -> dict[str, Any]:
        found: dict[str, Any] = (await cell.http.get(f"/v1/jobs/second/why?at={at}")).json()
        return found

    await cell.caught_up()
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
    for at, at_ms in ((waited_at, waited_ms), (placed_at, placed_ms)):
        for later_ms in (0, MS_PER_INPUT - 1):
            found = await cell.http.get("/v1/jobs/second/why", params={"at_ms": at_ms + later_ms})
            assert found.json() == answers[at], "the latest record of that time or before"
    both = await cell.http.get("/v1/jobs/second/why", params={"at": waited_at, "at_ms": placed_ms})
    assert both.json() == answers[waited_at]
    assert (
        "the oldest record that is stored is of"
        in problem(await cell.http.get("/v1/jobs/second/why?at_ms=1"), 404)["detail"]
    )


async def test_cancel(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 1))
    cell.placer.run(["done"])
    cell.placer.submit("runs")
    await cell.tell()
    await cell.caught_up()
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
    """A browser tab loses its connection again and again while jobs run: what it has seen in the end is the
    ledger."""
    seen: list[str] = []
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    await cell.tell()

    async def work() -> None:
        for number in range(12):
            placer.run([f"job-{number}"])
            await cell.tell()
            await cell.caught_up()  # so that connections are lost between records, too

    working = asyncio.create_task(work())
    last = "0"
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
    await cell.caught_up()
    async with cell.http.stream("GET", "/v1/stream", params={"job": "b"}) as response:
        lines = frames(response)
        cell.placer.submit("a")
        cell.placer.submit("b")
        await cell.tell()
        found = [await anext(lines) for _ in range(3)]
    assert {data["job_id"] for _, data in found} == {"b"}
    await cell.caught_up()
    async with cell.http.stream("GET", "/v1/stream") as response:
        lines = frames(response)
        cell.placer.submit("c")
        await cell.tell()
        assert (await anext(lines))[1]["job_id"] == "c"


async def test_a_stream_that_is_asked_until_a_record_ends_there(cell: Cell) -> None:
    """`penstock export` reads all there is while the cell works on: it gets each record whole, and then the
    end."""
    cell.placer.join(node_spec("n0", 2))
    for name in ("a", "b", "c"):
        cell.placer.submit(name)
    asking = asyncio.create_task(cell.http.get("/v1/stream", params={"after": "0", "until": 4}))

    async def streams() -> bool:
        return bool((await cell.http.get("/v1/status")).json()["streams"])

    await await_until(streams, "the stream")
    assert not asking.done(), "it waits for records that are not there yet"
    await cell.tell()
    whole = (await asking).text
    again = (await cell.http.get("/v1/stream", params={"after": "0", "until": 4})).text
    part = (await cell.http.get("/v1/stream", params={"after": "2.0", "until": 3})).text
    seen = [line.removeprefix("id: ") for line in whole.splitlines() if line.startswith("id: ")]
    assert seen[0] == "1.0"
    assert seen[-1].startswith("4.")
    assert again == whole
    assert {line.partition(".")[0] for line in part.splitlines() if line.startswith("id: ")} <= {
        "id: 2",
        "id: 3",
    }
    problem(await cell.http.get("/v1/stream", params={"until": "x"}), 400)


async def test_a_place_in_the_stream_must_exist(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 2), node_spec("n1", 2), node_spec("n2", 2))
    await cell.tell()
    await cell.caught_up()
    for wrong in ("x", "-1", "1.2.3", "9" * 40, "99"):
        problem(await cell.http.get("/v1/stream", headers={"Last-Event-ID": wrong}), 400)
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute("DELETE FROM penstock.events WHERE seq < 4")
    await connection.close()
    body = problem(await cell.http.get("/v1/stream", headers={"Last-Event-ID": "1.0"}), 410)
    assert "before record 4" in body["detail"]


async def test_the_past_below_the_ledgers_beginning(cell: Cell, tmp_path: Path) -> None:
    """The head of the ledger was archived: a question about that time is answered with the archive, and else
    the answer names what is missing."""
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    placer.submit("waits", gpus=2)
    placer.submit("later", gpus=2)
    await cell.tell()
    await cell.caught_up()
    place, at = Partition(Topic.LEDGER, 0), len(placer.values)
    inner = cell.log.inner
    assert (await cell.http.get("/v1/ledger")).json() == {
        "begin": 0,
        "end": at,
        "archive": None,
        "problem": "",
    }
    before = (await cell.http.get("/v1/jobs/later/why", params={"at": at})).json()
    archive = Archive(tmp_path)
    writer = Writer(archive, place)
    reader = inner.reader({place: 0})
    for record in await reader.read(max_records=at - 1):
        writer.add(record)
    await reader.close()
    writer.commit()
    await inner.delete_before({place: at - 2})
    found = problem(await cell.http.get("/v1/jobs/later/why", params={"at": at}), 410)
    assert "PENSTOCK_ARCHIVE" in found["detail"]
    assert "PENSTOCK_ARCHIVE" in (await cell.http.get("/v1/ledger")).json()["problem"]
    cell.log.inner = ArchivedLog(inner, archive)
    assert (await cell.http.get("/v1/jobs/later/why", params={"at": at})).json() == before
    ledger = (await cell.http.get("/v1/ledger")).json()
    assert (ledger["archive"]["begin"], ledger["archive"]["end"], ledger["problem"]) == (0, at - 1, "")


async def test_a_job_that_left_the_tables(cell: Cell) -> None:
    """A user asks for a job of two years ago: the answer names the archive and the command that reads it."""
    cell.placer.run([])
    await cell.tell()
    await cell.caught_up()
    assert "archive" not in problem(await cell.http.get("/v1/jobs/long-ago"), 404)["detail"]
    connection = await asyncpg.connect(cell.dsn)
    await connection.execute("UPDATE penstock.positions SET forgotten_ms = 1700000000000")
    await connection.close()
    detail = problem(await cell.http.get("/v1/jobs/long-ago"), 404)["detail"]
    assert "up to 2023-11-14" in detail
    assert "the ledger and its archive have them, `penstock replay --decision long-ago`" in detail
