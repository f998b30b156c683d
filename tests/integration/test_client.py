"""The Python client against a real gateway: lost answers, broken streams, errors, time limits."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock.client import (
    AsyncClient,
    BadRequest,
    Client,
    Conflict,
    KeyConflict,
    NotFound,
    Unreachable,
    WaitTimeout,
)
from penstock.exits import Exit
from penstock.model.topics import Topic
from penstock.model.types import JobSpec
from tests.support.gateway_cell import WITHIN_S, Cell, running
from tests.support.hand_placer import node_spec

pytestmark = pytest.mark.postgres


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


class Line:
    """Between client and gateway: `cut` breaks what is open, and the next `cut_answers` answers are lost on the way."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._there = (host, int(port))
        self.cut_answers = 0
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
                far_writer.write(piece)

        sending = asyncio.create_task(out())
        with contextlib.suppress(ConnectionError):
            while piece := await far_reader.read(65_536):
                if self.cut_answers:
                    self.cut_answers -= 1
                    break
                writer.write(piece)
        sending.cancel()
        for end in (writer, far_writer):
            end.transport.abort()
            self.open.discard(end)


async def test_an_answer_that_is_lost_twice_leads_to_one_job(cell: Cell) -> None:
    """The gateway's machine is restarted in the moment of the submission: the pipeline must neither fail nor train twice."""
    line = Line(cell.url)
    async with line.laid() as url:
        line.cut_answers = 2
        async with AsyncClient(url) as client:
            job = await client.submit(command=["true"], name="once")
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
    """A proxy closes streams after a minute: each event comes once, and a stored id continues in another process."""
    cell.placer.join(node_spec("n0", 2))
    cell.placer.run(["first"])
    await cell.tell()
    await cell.caught_up()
    line, seen = Line(cell.url), []
    async with asyncio.timeout(2 * WITHIN_S), line.laid() as url, AsyncClient(url) as client:
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


async def test_a_wait_ends_to_the_moment_and_with_each_job(cell: Cell) -> None:
    """One job ends, the other hangs: the pipeline goes on after its limit, although the stream stays silent."""
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
                asyncio.create_task(asyncio.to_thread(blocking.wait, "ends", timeout_s=WITHIN_S)),
                asyncio.create_task(client.wait("ends", timeout_s=WITHIN_S)),
            ]
            limited = [
                asyncio.create_task(asyncio.to_thread(blocking.wait, "hangs", "ends", timeout_s=1.0)),
                asyncio.create_task(client.wait("hangs", "ends", timeout_s=1.0)),
            ]
            for answer in limited:
                async with asyncio.timeout(WITHIN_S):  # far less than the stream's own comments take
                    with pytest.raises(WaitTimeout, match="of 2 jobs have not ended within 1 s"):
                        await answer
            cell.placer.finish("ends")
            await cell.tell()
            for found in await asyncio.gather(*waiting):
                assert [(job.job_id, job.outcome, job.code) for job in found] == [("ends", "succeeded", 0)]
            assert (await client.job("hangs")).outcome is None


async def test_errors_are_exceptions_with_fields_and_remedies(cell: Cell) -> None:
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


async def test_the_shell_completes_names_of_jobs_and_is_silent_without_a_gateway(cell: Cell) -> None:
    """A user types `penstock why nigh<TAB>`."""
    async with AsyncClient(cell.url) as client:
        await client.submit(command=["true"], name="nightly")
    cell.placer.submit("other", spec=JobSpec(command=("true",), name="nightly-2"))
    await cell.tell()
    await cell.caught_up()

    def typed(url: str, *words: str) -> list[str]:
        env = {
            **os.environ,
            "_PENSTOCK_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "PENSTOCK_SERVER": url,
        }
        done = subprocess.run(
            [sys.executable, "-c", "from penstock.cli.main import main; main()"], capture_output=True, text=True,
            timeout=60, check=False, env=env | {"COMP_CWORD": str(len(words) - 1)},
        )  # fmt: skip
        assert done.stderr == ""
        return done.stdout.split()

    assert await asyncio.to_thread(typed, cell.url, "penstock", "why", "nigh") == ["nightly-2"]
    assert await asyncio.to_thread(typed, "http://127.0.0.1:9", "penstock", "why", "nigh") == []
