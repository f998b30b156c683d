"""Addresses that nodes announce: by the route to the log, so that a gang over two machines finds its rank
0."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import asyncpg
import pytest

from penstock.ledger.replica.replica import Replica
from penstock.local.doctor.reach import log_findings
from penstock.log.port import Log, Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.log.postgres.embedded_schema import made_by
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.service import run as run_placer
from tests.support.cluster.driver import estimate
from tests.support.installation.namespaces import Machine, network
from tests.support.installation.system import clean_environment
from tests.support.node_reporter.node_cell import end_tasks, node_options

pytestmark = pytest.mark.postgres

LEDGER = Partition(Topic.LEDGER, 0)
RENDEZVOUS = """
import os, socket, sys, time
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if os.environ["RANK"] == "0":
    with socket.create_server(place) as server:
        connection, _ = server.accept()
        connection.sendall(b"0")
        sys.exit(connection.recv(1) != b"1")
while True:
    try:
        with socket.create_connection(place) as connection:
            connection.sendall(b"1")
            sys.exit(connection.recv(1) != b"0")
    except OSError as error:
        print(place, error, flush=True)
        time.sleep(0.1)
"""


@asynccontextmanager
async def forwarded(host: str, dsn: str) -> AsyncIterator[str]:
    """The database's URL on that address of this machine: its server listens on loopback alone."""
    parts = urlsplit(dsn)
    options = dict(parse_qsl(parts.query))
    folder, own_port = options.get("host", parts.hostname or ""), options.get("port", parts.port)

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, answers = await (
            asyncio.open_unix_connection(f"{folder}/.s.PGSQL.{own_port}")
            if folder.startswith("/")
            else asyncio.open_connection(folder, own_port)
        )
        copies = [asyncio.create_task(copied(reader, answers)), asyncio.create_task(copied(there, writer))]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, answers):
            end.transport.abort()
        await asyncio.gather(*copies, return_exceptions=True)

    async with await asyncio.start_server(carry, host, 0) as server:
        port = server.sockets[0].getsockname()[1]
        netloc = f"{parts.netloc.rpartition('@')[0]}@{host}:{port}"
        yield parts._replace(netloc=netloc, query="").geturl()


async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


@asynccontextmanager
async def reporter(machine: Machine, node_id: str, log_url: str, folder: Path) -> AsyncIterator[None]:
    """A node-reporter on that machine; at the end its tasks are ended, too."""
    options = node_options(folder, node_id=node_id)
    child = await started(machine, node_id, log_url, folder, stderr=None)
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
        yield
    finally:
        if child.returncode is None:
            child.terminate()
        await child.wait()
        end_tasks(options)


async def started(
    machine: Machine, node_id: str, log_url: str, folder: Path, *more: str, stderr: int | None
) -> asyncio.subprocess.Process:
    argv = [*machine.enter, sys.executable, "-m", "penstock_services.node_reporter", "--node-id", node_id]
    argv += ["--machine-id", node_id, "--state-dir", str(folder / "state"), "--log-dir", str(folder / "logs")]
    argv += ["--virtual-gpus", "1", "--cores", "1", "--host-memory", "1GiB", "--allow-root", *more]
    env = clean_environment(PENSTOCK_LOG=log_url)
    return await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE, stderr=stderr)


async def send(log: Log, *events: Event) -> None:
    for event in events:
        headers, value = to_wire(Envelope(id=f"t-{event.TYPE}", source="/test", time_ms=1, data=event))
        await log.append([Message(Partition(event.TOPIC or "", 0), value, headers)])


async def ledger_with(log: Log, holds: Callable[[Replica], bool]) -> Replica:
    """The ledger, once this holds."""
    replica, reader = Replica(), log.reader({LEDGER: 0})
    while not holds(replica):
        for record in await reader.read():
            replica.take(record.value, record.offset)
    await reader.close()
    return replica


@asynccontextmanager
async def placer(log: Log, dsn: str) -> AsyncIterator[None]:
    stop, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(run_placer(Settings(log_url=dsn, dsn=dsn), stop, log=log, ready=ready))
    await first_of(ready.wait(), asyncio.shield(task))
    try:
        yield
    finally:
        stop.set()
        await task


def outputs(folders: Sequence[Path]) -> str:
    return "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.log"))


async def test_a_gang_over_two_machines_meets_at_the_address_of_rank_0(dsn: str, tmp_path: Path) -> None:
    """Neither machine has a setting for its address. A third, whose administrator wrote loopback, is refused
    at its start."""
    with network(2) as (here, machines):
        folders = [tmp_path / "n0", tmp_path / "n1"]
        async with AsyncExitStack() as stack:
            log_url = await stack.enter_async_context(forwarded(here, dsn))
            log = await EmbeddedLog(dsn, "test").start()
            stack.push_async_callback(log.close)
            await log.create(topic_partitions(1))
            await stack.enter_async_context(placer(log, dsn))
            for number, machine in enumerate(machines):
                await stack.enter_async_context(reporter(machine, f"n{number}", log_url, folders[number]))
            joined = await ledger_with(log, lambda found: len(found.state.nodes) == len(machines))
            addresses = {name: node.spec.address for name, node in joined.state.nodes.items()}
            assert addresses == {f"n{number}": machine.address for number, machine in enumerate(machines)}
            spec = JobSpec(command=(sys.executable, "-c", RENDEZVOUS), workers=2)
            each = estimate(1, cores=1, memory_mib=64, gpu_memory_mib=0)
            await send(
                log, JobSubmitted(job_id="gang", spec=spec), JobEstimated(job_id="gang", estimate=each)
            )
            replica = await ledger_with(log, lambda found: "gang" in found.state.ended)
            assert replica.state.ended == {"gang": "succeeded"}, f"{addresses} {outputs(folders)}"
            wrong = ("--address", "127.0.0.1")
            folder, pipe = tmp_path / "n2", asyncio.subprocess.PIPE
            refused = await started(machines[0], "n2", log_url, folder, *wrong, stderr=pipe)
            _, complaint = await refused.communicate()
            assert refused.returncode == 2
            assert f"--address 127.0.0.1 is loopback, but the log is on {here}".encode() in complaint


async def found(url: str) -> list[tuple[str, bool]]:
    """What the doctor finds at this log: text, and whether it is well."""
    findings = await asyncio.to_thread(lambda: list(log_findings(url, node=True)))
    return [(f"{finding.found} {finding.remedy}", not finding.remedy) for finding in findings]


async def test_the_doctor_looks_at_the_log_of_a_node(dsn: str) -> None:
    """Before the set-up, after it, with another's role and with another database."""
    (_, well), (tables, tables_well), (clock, clock_well) = await found(dsn)
    assert (well, tables_well) == (True, False)
    assert "none yet create the roles" in tables
    assert clock_well, clock
    await (await EmbeddedLog(dsn, "test").start()).close()
    (text, well), (tables, tables_well), _ = await found(dsn)
    assert (well, tables_well) == (True, True), text + tables
    assert "as penstock, an administrator" in text
    assert urlsplit(dsn).password not in text
    connection = await asyncpg.connect(dsn)
    for version, remedy, stays in (
        (1, "run the set-up of this version", False),
        (999, "or a newer one", True),
    ):
        await connection.execute(f"COMMENT ON SCHEMA penstock_log IS 'penstock log {version}'")
        _, (tables, tables_well), _ = await found(dsn)
        assert not tables_well
        assert remedy in tables
        await (await EmbeddedLog(dsn, "test").start()).close()
        assert (await made_by(connection) == version) is stays, (
            "a service of the former version starts once more"
        )
    await connection.close()
    [(text, well)] = await found(dsn.replace("://penstock:", "://penstock_node_absent:"))
    assert not well
    assert "postgres_setup" in text
    [(text, well)] = await found(urlsplit(dsn)._replace(path="/absent").geturl())
    assert not well
    assert 'database "absent" does not exist' in text
