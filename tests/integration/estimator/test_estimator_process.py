"""The estimator as a process of its own, killed where it hurts."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.log.port import Log, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import CELL_TOPICS, Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from tests.support.installation.services import while_alive

pytestmark = pytest.mark.postgres


@asynccontextmanager
async def process(dsn: str, failpoint: str = "") -> AsyncIterator[asyncio.subprocess.Process]:
    """A ready estimator; killed at the end if it still lives."""
    environment = {
        **os.environ,
        **Settings(log_url=dsn, dsn=dsn).environment(),
        "PENSTOCK_FAILPOINT": failpoint,
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock_services.estimator", env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def submit(log: Log, job_id: str) -> None:
    event = JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",)))
    headers, value = to_wire(Envelope(f"submit-{job_id}", "/test", 1_000, event))
    await log.append([Message(Partition(Topic.JOBS, 0), value, headers)])


@pytest.mark.parametrize(
    ("failpoint", "repeated"), [("estimator.input_read", False), ("estimator.estimate_sent", True)]
)
async def test_killed_between_reading_and_answering_it_loses_nothing(
    dsn: str, failpoint: str, repeated: bool
) -> None:
    """kill -9 right after the read, or right after the append: the successor answers what the ledger and the
    jobs topic still leave open; a repeated answer is the same one. SIGTERM ends it with 0."""
    log = await EmbeddedLog(dsn, "test").start()
    await log.create(dict.fromkeys(CELL_TOPICS, 1))
    async with process(dsn, f"{failpoint}:1") as victim:
        await submit(log, "job-1")
        assert await victim.wait() == -signal.SIGKILL
        await submit(log, "job-2")
    expected = ["estimate-job-1"] * (1 + repeated) + ["estimate-job-2"]
    reader = log.reader({Partition(Topic.ESTIMATES, 0): 0})
    found: list[Envelope] = []
    async with process(dsn) as successor:
        life = asyncio.create_task(successor.wait())
        while len(found) < len(expected):
            records = await while_alive(reader.read(), life)
            found += [from_wire(record.headers, record.value) for record in records]
        successor.terminate()
        assert await life == 0
    assert [envelope.id for envelope in found] == expected
    assert len({(e.id, str(e.data)) for e in found}) == 2
    await reader.close()
    await log.close()
