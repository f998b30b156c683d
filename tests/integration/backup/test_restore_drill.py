"""The restore drill: a cell of real processes loses the volumes of its log and its database, and goes on from
a copy.

On Kafka both volumes are lost, on the embedded log the one that holds everything. The node-reporters and
their tasks live on, as they do on machines of their own.
"""

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from infra.devservers.kafka import KafkaBroker, new_cluster_id
from infra.devservers.processes import Child, free_port
from penstock.log.open import open_log
from penstock.log.port import Message, Partition, Record
from penstock.model.decisions.orders import StartTask
from penstock.model.nouns.token import seq_of, token_of
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import from_wire
from penstock.runtime.database.postgres_server import PostgresServer
from penstock.runtime.keys.node_keys import key_file_at
from tests.conftest import reachable_folder
from tests.support.cli.command_process import PENSTOCK
from tests.support.installation.system import Gateway, clean_environment, file_ends, python_service
from tests.support.processes import processes_with
from tests.support.story import told
from tests.support.waiting import left_s, wait_until

pytestmark = pytest.mark.postgres

SERVICES = ("placer", "estimator", "projector", "gateway")
NODES = ("n0", "n1")
PROGRAM = """
name, place = sys.argv[1:]
gpu = open(f"{place}/{os.environ['PENSTOCK_NODE_ID']}.gpu", "a")
try:
    fcntl.flock(gpu, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(f"{place}/{name}.met-another", "w").close()
open(f"{place}/{name}.{uuid.uuid4().hex}.ran", "w").close()
while not os.path.exists(f"{place}/{name}.may-end"):
    time.sleep(0.05)
"""
"""A job that holds its node's one GPU, notes each of its starts, and ends when it may."""


class Site:
    """Servers with volumes that can be lost, services, two nodes of one virtual GPU, and the folder in which
    jobs leave marks."""

    def __init__(self, folder: Path, log: Literal["embedded", "kafka"]) -> None:
        self.folder = folder
        self.copies = folder / "copies"
        self.marks = folder / "marks"
        self.marks.mkdir(mode=0o777)
        self.postgres = PostgresServer()
        self.broker = KafkaBroker(folder / "broker") if log == "kafka" else None
        if self.broker is not None:
            self.broker.start()
            self.broker.create_topics()
        self.dsn = asyncio.run(self.postgres.start(folder / "pg"))
        self.port = free_port()
        self.gateway = Gateway(f"http://127.0.0.1:{self.port}")
        self.children: dict[str, Child] = {}

    @property
    def log_url(self) -> str:
        return self.dsn if self.broker is None else self.broker.url()

    def environment(self) -> dict[str, str]:
        return clean_environment(
            PENSTOCK_LOG=self.log_url,
            PENSTOCK_DSN=self.dsn,
            PENSTOCK_GATEWAY_BIND=f"127.0.0.1:{self.port}",
            PENSTOCK_NODE_LOG_KEY=str(key_file_at(self.folder / "keys" / "logs.key")),
            PENSTOCK_OPERATOR_KEY=str(key_file_at(self.folder / "keys" / "operator.key")),
        )

    def start(self, *names: str) -> None:
        with ThreadPoolExecutor() as pool:
            started = pool.map(self._start, names)
            self.children |= dict(zip(names, started, strict=True))

    def _start(self, name: str) -> Child:
        module, arguments = name, []
        if name in NODES:
            module = "node_reporter"
            arguments = ["--node-id", name, "--virtual-gpus", "1", "--cores", "2", "--host-memory", "8GiB"]
            arguments += ["--state-dir", str(self.folder / name), "--allow-root"]
            arguments += ["--log-dir", str(self.folder / f"{name}-output")]
        life = len(
            list(self.folder.glob(f"{name}.*.log"))
        )  # a log of its own: it is ready when its log says so
        path = self.folder / f"{name}.{life}.log"
        return python_service(module, arguments, log_path=path, env=self.environment())

    def stop(self, *names: str) -> None:
        """SIGTERM; a node-reporter leaves its tasks running."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.children[name].stop(max(0.0, left_s())), names))

    def lose_the_volumes(self) -> None:
        """Log, database and keys are gone; their servers come up empty at the same places."""
        asyncio.run(self.postgres.stop())
        shutil.rmtree(self.folder / "pg")
        shutil.rmtree(self.folder / "keys")
        self.dsn = asyncio.run(self.postgres.start(self.folder / "pg"))
        if self.broker is not None:
            self.broker.kill9()
            self.broker.prepare([self.broker], new_cluster_id())
            self.broker.launch()
            self.broker.wait_ready()

    def close(self) -> None:
        for child in self.children.values():
            child.kill9()
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        asyncio.run(self.postgres.stop())
        if self.broker is not None:
            self.broker.kill9()

    def command(self, *arguments: str, keys: bool = True) -> tuple[int, dict[str, Any], str]:
        """A `penstock …` with `-o json`: exit code, answer, stderr."""
        env = self.environment()
        if not keys:
            shutil.rmtree(self.folder / "keys")

        async def run() -> tuple[int, bytes, bytes]:
            process = await asyncio.create_subprocess_exec(
                *PENSTOCK, *arguments, "-o", "json", env=env, stdout=-1, stderr=-1
            )
            out, err = await process.communicate()
            assert process.returncode is not None
            return process.returncode, out, err

        code, out, err = asyncio.run(run())
        return code, json.loads(out) if out else {}, err.decode()

    def submit(self, name: str) -> str:
        """A job for one GPU, acknowledged."""
        script = f"import fcntl, os, sys, time, uuid\n{PROGRAM}"
        command = [sys.executable, "-c", script, name, str(self.marks)]
        resources = {"gpus": 1, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 64}
        return self.gateway.submit(command, name=name, resources=resources)

    def may_end(self, name: str) -> None:
        (self.marks / f"{name}.may-end").touch()

    def starts_of(self, name: str) -> int:
        """Number of its starts so far."""
        return len(list(self.marks.glob(f"{name}.*.ran")))

    def until_started(self, name: str) -> None:
        wait_until(lambda: self.starts_of(name), f"the start of {name}")

    def until_ended(self, name: str, job_id: str) -> dict[str, Any]:
        """The job, once it has started and has come to its end."""
        self.until_started(name)
        self.may_end(name)
        return self.gateway.until_ended(job_id)

    def runs(self, name: str) -> bool:
        """Whether a process of this job lives."""
        return bool(processes_with(f"\0{name}\0{self.marks}\0".encode()))

    def orders_for(self, node_id: str) -> list[Record]:
        async def read() -> list[Record]:
            place, found = Partition(Topic.ORDERS, node_partition(node_id)), []
            log = await open_log(self.log_url, "test").start()
            reader = log.reader(await log.begin_offsets([place]))
            while reader.position(place) < (await log.end_offsets([place]))[place]:
                found += await reader.read()
            await reader.close()
            await log.close()
            return found

        return asyncio.run(read())

    def send(self, record: Record) -> None:
        """Appends a record as it was read before, from the log that is lost."""

        async def append() -> None:
            log = await open_log(self.log_url, "test").start()
            await log.append([Message(record.partition, record.value, record.headers, record.key)])
            await log.close()

        asyncio.run(append())


@pytest.fixture(
    params=[
        pytest.param("embedded", marks=pytest.mark.slow),
        pytest.param("kafka", marks=pytest.mark.kafka),
    ]
)
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    with reachable_folder() as folder:
        found = Site(folder, request.param)
        try:
            with told("the processes' logs", lambda: file_ends(folder.glob("*.log"))):
                yield found
        finally:
            found.close()


def start_of(record: Record, job_id: str) -> StartTask | None:
    """The order, if it starts a task of this job."""
    order = from_wire(record.headers, record.value).data
    return order if isinstance(order, StartTask) and order.job_id == job_id else None


def test_both_volumes_are_lost_and_the_cell_goes_on_from_its_copy(site: Site) -> None:
    """A disk array dies on Tuesday, with the broker's and the database's volumes. Monday's copy is restored:
    each job that was acknowledged before it is there, also one that no placer had read; what runs of it runs
    on. A job that was placed on Tuesday runs on its node, unknown to the cell: it is ended before anything
    else gets its GPU, and its order, which comes late, starts nothing."""
    site.start(*SERVICES, *NODES)
    site.gateway.until_nodes(len(NODES))
    ended, runs = site.submit("ended"), site.submit("runs")
    site.until_started("ended")
    site.until_started("runs")
    site.may_end("ended")
    site.gateway.until_ended(ended)
    site.stop("placer")
    unread = site.submit("unread")

    code, taken, err = site.command("backup", str(site.copies / "monday"))
    assert code == 0, err
    code, verified, err = site.command("backup", str(site.copies / "monday"), "--verify")
    assert (code, verified["head"]) == (0, taken["head"]), err

    site.start("placer")
    site.until_ended("unread", unread)
    tuesday = site.submit("tuesday")
    site.until_started("tuesday")
    [(lost, order)] = [
        (record, order)
        for node_id in NODES
        for record in site.orders_for(node_id)
        if (order := start_of(record, tuesday)) is not None
    ]
    site.stop(*SERVICES, *NODES)
    assert (site.runs("runs"), site.runs("tuesday")) == (True, True), "no reporter ends its tasks"
    site.lose_the_volumes()

    code, restored, err = site.command("restore", str(site.copies / "monday"), keys=False)
    assert code == 0, err
    assert (restored["head"], restored["epoch"], restored["left"]) == (taken["head"], 1, [])
    code, _, err = site.command("restore", str(site.copies / "monday"))
    assert (code, "has" in err, "nothing was changed" in err) == (2, True, True), err
    site.start(*SERVICES)
    rows = {job["job_id"]: job for job in site.gateway.get("/v1/jobs?limit=1000")["jobs"]}
    assert rows.keys() >= {ended, runs}
    assert tuesday not in rows, "it was acknowledged after the copy"
    assert site.runs("tuesday")
    site.start(*NODES)
    wait_until(lambda: not site.runs("tuesday"), "the end of the task that only the lost history knows")
    site.gateway.until(unread, "succeeded")
    assert site.starts_of("runs") == 1, "what the copied ledger has placed runs on"
    new = site.submit("new")
    site.until_started("new")
    assert site.starts_of("tuesday") == 1

    site.send(lost)  # a broker's replica that was away has kept it
    site.may_end("new")
    site.gateway.until_ended(new)
    last = site.submit("last")
    site.may_end("runs")
    assert site.until_ended("last", last)["outcome"] == "succeeded"
    assert site.gateway.until_ended(runs)["outcome"] == "succeeded"
    assert site.starts_of("tuesday") == 1, "an order of the lost history was obeyed"
    assert not list(site.marks.glob("*.met-another")), "two tasks had one GPU"
    tokens = [
        found.token
        for record in site.orders_for(order.node_id)
        if (found := start_of(record, new) or start_of(record, last)) is not None
    ]
    assert [token == token_of(1, seq_of(token)) > order.token for token in tokens] == [True, True]
