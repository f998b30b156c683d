"""The Python client against a real gateway: lost answers, broken streams, errors, time limits."""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, assert_type

import pytest
import pytest_asyncio

from penstock.cli.app import run as penstock
from penstock.client import (
    AsyncClient,
    AsyncFinishedJob,
    AsyncJobHandle,
    BadRequest,
    Client,
    Conflict,
    Event,
    FinishedJob,
    Job,
    JobHandle,
    KeyConflict,
    NotFound,
    Unreachable,
    WaitTimeout,
)
from penstock.client import streams as client_streams
from penstock.client.aio import gateway as awaited_gateway
from penstock.client.sync import gateway as blocking_gateway
from penstock.exits import Exit
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock_services.gateway.shell.routes import stream as gateway_stream
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import DAY_S, Cell, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


class Line:
    """Between client and gateway: `cut` breaks what is open, and the next `cut_answers` answers are lost on
    the way."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._there = (host, int(port))
        self.cut_answers = 0
        self.answered = b""
        """What has passed to the client."""
        self.handshakes = 0
        """How often it was asked whether TLS is spoken here, for which an event loop stands still."""
        self.open: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in self.open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._there)
        self.open |= {writer, far_writer}

        async def out() -> None:
            while piece := await reader.read(65_536):
                self.handshakes += piece[0] == 0x16
                far_writer.write(piece)
            far_writer.close()  # the client has hung up

        sending = asyncio.create_task(out())
        with contextlib.suppress(ConnectionError):
            while piece := await far_reader.read(65_536):
                if self.cut_answers:
                    self.cut_answers -= 1
                    break
                writer.write(piece)
                self.answered += piece
        sending.cancel()
        for end in (writer, far_writer):
            end.transport.abort()
            self.open.discard(end)


async def test_an_answer_that_is_lost_twice_leads_to_one_job(cell: Cell) -> None:
    """The gateway's machine is restarted in the moment of the submission: the pipeline must neither fail nor
    train twice."""
    line = Line(cell.url)
    async with line.laid() as url:
        line.cut_answers = 2
        async with AsyncClient(url) as client:
            job = await client.submit(command=["true"], name="once")
        assert line.handshakes == 1
        line.cut_answers = 1
        with Client(url) as blocking:
            again = await asyncio.to_thread(blocking.submit, command=["true"], name="twice")
        line.cut_answers = 1
        with Client(url) as blocking, pytest.raises(Unreachable):
            await asyncio.to_thread(blocking.cancel, job.job_id)  # carries no key: it may have been done
    written = {event.data.job_id for event in await cell.written(Topic.JOBS) if hasattr(event.data, "spec")}
    assert written == {job.job_id, again.job_id}
    assert job.repeated, "the first request had reached the log"


async def test_events_resume_where_the_line_broke(cell: Cell) -> None:
    """A proxy closes streams after a minute: each event comes once, and a stored id continues in another
    process."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.run(["first"])
    await cell.tell()
    await cell.caught_up()
    line, seen = Line(cell.url), []
    async with line.laid() as url, AsyncClient(url) as client:
        async for event in client.events(after="0"):
            seen.append(event)
            if len(seen) in (1, 3):
                line.cut()
            if event.type == "penstock.job.ended" and event.job_id == "first":
                cell.placer.run(["second"])
                await cell.tell()
            elif event.type == "penstock.job.ended":
                break
    places = [(event.seq, event.n) for event in seen]
    assert places == sorted(set(places))
    whole = (await cell.http.get("/v1/jobs/second/events")).json()["events"]
    assert [event.seq for event in seen if event.job_id == "second"] == [row["seq"] for row in whole]

    def rest() -> list[str]:
        with Client(cell.url) as blocking:
            later = blocking.events(after=seen[-2].id)
            return [next(later).id]

    assert await asyncio.to_thread(rest) == [seen[-1].id]


async def test_a_wait_ends_to_the_moment_and_with_each_job(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job ends, the other hangs: the pipeline goes on after its limit, although the stream stays
    silent."""
    monkeypatch.setattr(gateway_stream, "QUIET_S", DAY_S)
    monkeypatch.setattr(client_streams, "SILENCE_S", DAY_S)
    cell.placer.join(node_spec("n0", 2))
    cell.placer.submit("hangs")
    cell.placer.start("hangs")
    cell.placer.submit("ends")
    cell.placer.start("ends")
    await cell.tell()
    await cell.caught_up()
    async with AsyncClient(cell.url) as client:
        with Client(cell.url) as blocking:
            waiting = [
                asyncio.create_task(asyncio.to_thread(blocking.wait, "ends")),
                asyncio.create_task(client.wait("ends")),
            ]
            jobs, limit_s = ("hangs", "ends"), 0.5
            limited = [
                asyncio.create_task(wait)
                for wait in (
                    asyncio.to_thread(blocking.wait, *jobs, timeout_s=limit_s),  # clock: it is what is tested
                    client.wait(*jobs, timeout_s=limit_s),
                )
            ]
            for answer in limited:
                with pytest.raises(WaitTimeout, match=r"of 2 jobs have not ended within 0\.5 s"):
                    await answer
            cell.placer.finish("ends")
            await cell.tell()
            for found in await asyncio.gather(*waiting):
                assert [(job.job_id, job.outcome, job.code) for job in found] == [("ends", "succeeded", 0)]
            assert (await client.job("hangs")).outcome is None


async def streams_of(cell: Cell, wanted: int) -> None:
    """Until so many streams are open at the gateway."""

    async def open_now() -> bool:
        return bool((await cell.http.get("/v1/status")).json()["streams"] == wanted)

    await await_until(open_now, f"{wanted} streams")


async def test_events_from_now_on_lose_none_where_the_line_breaks_at_once(cell: Cell) -> None:
    """A monitor starts in a quiet cell. Its line breaks before the first event, and a job runs until it is
    back."""
    await cell.tell()
    await cell.caught_up()
    line, seen = Line(cell.url), []
    async with line.laid() as url, AsyncClient(url) as client:

        async def watch() -> None:
            async for event in client.events():
                seen.append(event)
                if event.type == "penstock.job.ended":
                    return

        watching = asyncio.create_task(watch())
        await await_until(lambda: b"retry: " in line.answered, "the place at which the stream begins")
        line.cut_answers = 2  # of its attempts to come back
        line.cut()
        cell.placer.join(node_spec("n0", 2))
        cell.placer.run(["meanwhile"])
        await cell.tell()
        await cell.caught_up()
        await watching
        assert line.handshakes == 0, "it had answered in plain text before"
        await streams_of(cell, 0)  # closed with the iterator, before the client is
    whole = (await cell.http.get("/v1/jobs/meanwhile/events")).json()["events"]
    assert [event.seq for event in seen if event.job_id] == [row["seq"] for row in whole]


async def test_a_wait_takes_names_and_never_returns_a_job_that_seems_not_to_have_ended(cell: Cell) -> None:
    """A notebook waits for `nightly`. The read models have its end before the gateway's own copy of the
    ledger has it."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.submit("k1", spec=JobSpec(command=("true",), name="nightly"))
    cell.placer.start("k1")
    await cell.tell()
    await cell.caught_up()
    async with AsyncClient(cell.url) as client:
        with Client(cell.url) as blocking:
            waiting = [
                asyncio.create_task(client.wait("nightly", "k1")),
                asyncio.create_task(asyncio.to_thread(blocking.wait, "nightly")),
            ]
            await streams_of(cell, 2)
            cell.log.reads.clear()
            cell.placer.finish("k1")
            await cell.tell()

            async def projected() -> bool:
                return (await client.status()).projected_seq >= len(cell.placer.values)

            await await_until(projected, "the job's end in the read models")
            await asyncio.sleep(
                0.1
            )  # clock: nothing may happen: the ends arrive, and a slow machine only misses a fault
            assert (await client.job("k1")).outcome is None
            assert not any(task.done() for task in waiting)
            cell.log.reads.set()
            found = [job for jobs in await asyncio.gather(*waiting) for job in jobs]
        assert [(job.job_id, job.outcome) for job in found] == [("k1", "succeeded")] * 3
        at_once = await client.wait("nightly", timeout_s=0)  # clock: a limit of 0 is one look
        assert [job.outcome for job in at_once] == ["succeeded"]
        assert await client.wait() == []


async def test_a_hundred_waits_at_once_each_have_a_stream(cell: Cell) -> None:
    """`asyncio.gather` over the handles of a sweep."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.submit("sweep")
    cell.placer.start("sweep")
    await cell.tell()
    await cell.caught_up()
    async with AsyncClient(cell.url) as client:
        handle = await client.handle("sweep")
        waits = asyncio.gather(*(handle.wait() for _ in range(110)))
        await streams_of(cell, 110)
        cell.placer.finish("sweep")
        await cell.tell()
        assert {done.outcome for done in await waits} == {"succeeded"}


async def test_what_is_no_name_is_not_found_and_names_serve_every_call(cell: Cell) -> None:
    """A path, a query or nothing at all typed for a job; and a name for each verb."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.run(["done"])
    cell.placer.submit("k1", spec=JobSpec(command=("true",), name="team/nightly"))
    await cell.tell()
    await cell.caught_up()
    async with AsyncClient(cell.url) as client:
        for text in ("done/tasks", "../status", ".", "", "done?x=1", "done#x", "do ne", "x" * 3_000):
            for ask in (client.job, client.cancel, client.why, client.logs, client.wait):
                with pytest.raises(NotFound, match="not found; `penstock get jobs`") as missing:
                    await ask(text)
                assert len(str(missing.value)) < 200
        assert (await client.why("team/nightly")).job_id == "k1"
        assert (await client.eta("team/nightly")).job_id == "k1"
        assert (await client.hold("team/nightly")).job_id == "k1"
        assert [job.job_id async for job in client.all_jobs()] == ["k1", "done"]
        assert [job.job_id async for job in client.all_jobs(name="team/nightly")] == ["k1"]


async def test_errors_are_exceptions_with_fields_and_remedies(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline branches on the kind of failure, and a person reads which field to change."""
    async with AsyncClient(cell.url) as client:
        with pytest.raises(BadRequest) as wrong:
            await client.submit(command=["true"], resources={"gpus": "many"}, retry={"max_attempts": 0})
        assert {field.field for field in wrong.value.fields} == {"resources.gpus", "retry.max_attempts"}
        assert all(field.remedy for field in wrong.value.fields)
        assert wrong.value.code == Exit.BAD_SPEC
        job = await client.submit(command=["true"], key="one")
        same = await client.submit(command=["true"], key="one")
        assert (same.job_id, same.repeated) == (job.job_id, True)
        with pytest.raises(KeyConflict) as taken:
            await client.submit(command=["false"], key="one")
        assert (taken.value.code, taken.value.status, taken.value.remedy) == (22, 409, "use another key")
        with pytest.raises(NotFound, match="penstock get jobs"):
            await client.job("nowhere")
        cell.placer.join(node_spec("n0", 2))
        cell.placer.run(["done"])
        await cell.tell()
        await cell.caught_up()
        with pytest.raises(Conflict, match="has already ended") as late:
            await client.cancel("done")
        assert (late.value.kind, late.value.code) == ("job_ended", 1)
    with pytest.raises(BadRequest, match="not encrypted"):
        Client("http://127.0.0.1:1", ca="/nowhere")
    with (
        Client("http://127.0.0.1:9", tries=2) as unreachable,
        pytest.raises(Unreachable, match="penstock up"),
    ):
        await asyncio.to_thread(unreachable.status)
    for module in (
        awaited_gateway,
        blocking_gateway,
        client_streams,
    ):  # so that a wait which made all attempts would never end
        for pause in ("FIRST_PAUSE_S", "LAST_PAUSE_S"):
            monkeypatch.setattr(module, pause, DAY_S)
    async with AsyncClient("http://127.0.0.1:9") as away:
        with pytest.raises(Unreachable, match="penstock up"):
            await away.wait("job", timeout_s=0.2)  # clock: it is what is tested
    with Client("http://127.0.0.1:9") as blocking, pytest.raises(Unreachable):
        await asyncio.to_thread(blocking.wait, "job", timeout_s=0.2)  # clock: it is what is tested


def signature(method: Any) -> list[str]:
    return [str(parameter) for parameter in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize(
    ("blocking", "awaited"),
    [(Client, AsyncClient), (JobHandle, AsyncJobHandle), (FinishedJob, AsyncFinishedJob)],
)
def test_both_clients_have_the_same_methods(blocking: type, awaited: type) -> None:
    """A pipeline moves to an event loop and finds every call again."""
    found = [
        {
            name: signature(method)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if name[0] != "_"
        }
        for kind in (blocking, awaited)
    ]
    assert [name.replace("Async", "") for name in map(str, found[1].items())] == [
        name.replace("Async", "") for name in map(str, found[0].items())
    ]


def types(client: Client, aio: AsyncClient) -> None:
    """What the type checker sees of it, never run: a wrong type fails the check of types."""
    handle = client.submit(command=["true"], name="typed")
    assert_type(handle.wait(timeout_s=1.0).raise_for_outcome(), FinishedJob)  # clock: it is never run
    assert_type(client.wait("a", "b"), list[Job])
    assert_type(client.jobs(owner="ana").jobs, tuple[Job, ...])
    assert_type(next(client.events()).data, dict[str, Any] | None)
    assert_type(aio.events(), AsyncGenerator[Event, None])
    with contextlib.closing(client.all_jobs(labels={"sweep": "first"})) as found:
        assert_type(next(found).outcome, str | None)


async def test_a_watch_into_a_pipe_is_a_line_of_json_per_change_until_ctrl_c(cell: Cell) -> None:
    """`penstock get jobs -w -o json --name nightly | jq .status`, with the number of lines bounded at its
    start."""
    cell.placer.join(node_spec("n0", 2))
    for job_id in ("k1", "k2"):
        cell.placer.submit(job_id, spec=JobSpec(command=("true",), name="nightly"))
    await cell.tell()
    await cell.caught_up()
    words = ("get", "jobs", "-w", "-o", "json", "--name", "nightly", "--limit", "1")
    watching = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from penstock.cli.main import main; main()",
        "--server",
        cell.url,
        *words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert watching.stdout is not None
    first = json.loads(await watching.stdout.readline())
    assert (first["job_id"], first["outcome"]) == ("k2", None)
    cell.placer.start("k1")
    cell.placer.finish("k1")
    await cell.tell()
    while (changed := json.loads(await watching.stdout.readline()))["outcome"] is None:
        assert changed["job_id"] == "k1"
    assert (changed["job_id"], changed["outcome"]) == ("k1", "succeeded")
    watching.send_signal(signal.SIGINT)
    rest, errors = await watching.communicate()
    assert (watching.returncode, errors) == (Exit.INTERRUPTED, b"")
    assert all(json.loads(line)["outcome"] == "succeeded" for line in rest.splitlines())


async def test_wait_and_why_on_the_command_line(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    """A look without waiting, and questions about times at which there is nothing to ask."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.run(["done"])
    cell.placer.submit("k1", spec=JobSpec(command=("true",), name="nightly"))
    await cell.tell()
    await cell.caught_up()

    async def shown(*words: str) -> tuple[int, str]:
        code = await asyncio.to_thread(penstock, ["--server", cell.url, *words])
        return code, "".join(capsys.readouterr())

    assert await shown("wait", "done", "--timeout", "0") == (0, "done  succeeded  job\n")
    code, text = await shown("wait", "nightly", "--timeout", "0")
    meant, waited = text.splitlines()
    assert meant.startswith("nightly: waits for k1, the latest job of this name, submitted ")
    assert (code, waited) == (Exit.WAIT_TIMEOUT, "penstock: job k1 has not ended within 0 s; it goes on")
    for at in ("1970-01-01", "1"):
        code, text = await shown("why", "nightly", "--at", at)
        assert (code, "job k1 was submitted at" in text) == (Exit.PROBLEM, True), text
    code, text = await shown("get", "jobs", "--label", "team!=vision")
    assert (code, "--label team!=vision: is not NAME=VALUE" in text) == (Exit.BAD_SPEC, True)
    assert await shown("queue", "--name", "nothing") == (0, "No job that waits fits.\n")
    code, text = await shown("get", "jobs", "--state", "Succeeded")
    assert (code, "done" in text) == (0, True)
    code, text = await shown("get", "job", "done", "-w", "-o", "json")
    assert (code, json.loads(text)["outcome"]) == (0, "succeeded")


async def test_the_shell_completes_names_of_jobs_and_is_silent_without_a_gateway(cell: Cell) -> None:
    """A user types `penstock why nigh<TAB>`."""
    async with AsyncClient(cell.url) as client:
        await client.submit(command=["true"], name="nightly")
    cell.placer.submit("other", spec=JobSpec(command=("true",), name="nightly-2"))
    await cell.tell()
    await cell.caught_up()

    program = "from penstock.cli import completion, main; completion.LIMIT_MS = 86_400_000; main.main()"

    def typed(url: str, *words: str) -> list[str]:
        env = {
            **os.environ,
            "_PENSTOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "PENSTOCK_SERVER": url,
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            env=env | {"COMP_CWORD": str(len(words) - 1)},
        )
        assert done.stderr == ""
        return done.stdout.split()

    assert await asyncio.to_thread(typed, cell.url, "penstock", "why", "nigh") == ["nightly", "nightly-2"]
    cell.placer.join(node_spec("n0", 2))
    await cell.tell()
    await cell.caught_up()
    assert await asyncio.to_thread(typed, cell.url, "penstock", "node", "drain", "") == ["n0"]
    assert await asyncio.to_thread(typed, "http://127.0.0.1:9", "penstock", "why", "nigh") == []
