"""Upgrade and back, one process after the other, under load: nothing is lost, and running jobs go on."""

import asyncio
import contextlib
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from infra.devservers.processes import Child, free_port
from penstock.clock import wall_ms
from penstock.ledger.record.record import read
from penstock.local.services import NAMES as SERVICES
from penstock.log.open import open_log
from penstock.log.port import Partition
from penstock.model.schema.topics import CELL_TOPICS, NODE_PARTITIONS, Topic
from penstock.runtime.keys.node_keys import key_file_at
from tests.conftest import reachable_folder
from tests.e2e.operation.test_kafka_system import database
from tests.support.installation.releases import Release, next_version, of_commit, working_tree
from tests.support.installation.system import Gateway, clean_environment, file_ends, python_service
from tests.support.processes import processes_with
from tests.support.story import told
from tests.support.waiting import left_s, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

NODES = ("n0", "n1")
UNDER_WAY = 4  # jobs at a time: the cell has four GPUs, one of them with the long job
AFTER_EACH = 4  # jobs that must be submitted and end after each replaced process
AGAIN_S = 0.05
REST_S = 0.3  # of a user between two jobs: the machine is for the services
LEDGER = Partition(Topic.LEDGER, 0)


class Cell:
    """Every service and two nodes, each a process of a version of its own, on one embedded log."""

    def __init__(self, dsn: str, folder: Path, release: Release) -> None:
        self.folder = folder
        self._dsn = dsn
        port = free_port()
        self._bind = f"127.0.0.1:{port}"
        self.gateway = Gateway(f"http://127.0.0.1:{port}")
        self.children: dict[str, Child] = {}
        self.replaced: list[tuple[int, str]] = []
        """When a process was asked to end, by the machine's clock in ms, and which."""
        for name in (*SERVICES, *NODES):
            self.start(name, release)

    def start(self, name: str, release: Release) -> None:
        """Returns when it is ready."""
        module, arguments = name.replace("-", "_"), []
        if name in NODES:
            module, arguments = "node_reporter", self._of_node(name)
        env = self._environment(release)
        path = self.folder / f"{name}.{len(list(self.folder.glob(f'{name}.*.log')))}.log"
        self.children[name] = python_service(module, arguments, log_path=path, env=env)

    def replace(self, name: str, release: Release) -> None:
        """As a supervisor does: the one ends in order, the other begins."""
        self.replaced.append((wall_ms(), name))
        self.children[name].stop(max(0.0, left_s()))
        assert self.children[name].exit_code == 0, self.children[name].log_tail()
        self.start(name, release)

    def stop(self) -> None:
        """Also what a failed test has left of tasks, which outlive their reporter."""
        for child in self.children.values():
            child.stop(max(0.0, left_s()))
        for pid in processes_with(str(self.folder).encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def check(self) -> None:
        """Raises `AssertionError` where a process has ended by itself."""
        for name, child in self.children.items():
            assert child.running, f"{name} has ended:\n{child.log_tail()}"

    def _environment(self, release: Release) -> Mapping[str, str]:
        return clean_environment(
            PYTHONPATH=release.path,
            PENSTOCK_DSN=self._dsn,
            PENSTOCK_LOG=self._dsn,
            PENSTOCK_GATEWAY_BIND=self._bind,
            PENSTOCK_NODE_LOG_KEY=str(key_file_at(self.folder / "logs.key")),
            PENSTOCK_OPERATOR_KEY=str(key_file_at(self.folder / "operator.key")),
        )

    def _of_node(self, name: str) -> list[str]:
        arguments = ["--node-id", name, "--virtual-gpus", "2", "--cores", "4", "--host-memory", "8GiB"]
        arguments += [
            "--state-dir",
            str(self.folder / name),
            "--log-dir",
            str(self.folder / f"{name}-output"),
        ]
        return [*arguments, "--allow-root"]


class Load:
    """Short jobs from several users, in threads, until it is closed. A user who gets no answer asks again
    with the same key."""

    def __init__(self, gateway: Gateway) -> None:
        self.acknowledged: list[str] = []
        self._gateway = gateway
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._user, args=(n,)) for n in range(UNDER_WAY - 1)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _user(self, number: int) -> None:
        count = 0
        while not self._ending.is_set():
            count += 1
            job_id = self._submitted(f"user-{number}-{count}")
            if job_id:
                self.acknowledged.append(job_id)
                self._until_ended(job_id)
                self._ending.wait(REST_S)

    def _submitted(self, key: str) -> str:
        while not self._ending.is_set():
            with contextlib.suppress(OSError, urllib.error.URLError, AssertionError):
                return self._gateway.submit(["true"], headers={"Idempotency-Key": key})
            self._ending.wait(AGAIN_S)  # clock: a user asks again when there was no answer
        return ""

    def _until_ended(self, job_id: str) -> None:
        while not self._ending.is_set():
            with contextlib.suppress(OSError, urllib.error.URLError, AssertionError):
                if self._gateway.job(job_id)["outcome"] is not None:
                    return
            self._ending.wait(AGAIN_S)  # clock: a user asks again when there was no answer


@contextlib.contextmanager
def running(dsn: str, release: Release) -> Iterator[Cell]:
    """The cell, and what its parts have logged if it fails."""

    async def create() -> None:
        log = await open_log(dsn, "test").start()
        topics = {str(topic): 1 for topic in (*CELL_TOPICS, Topic.DEAD_LETTERS)}
        await log.create(topics | {Topic.ORDERS: NODE_PARTITIONS, Topic.TELEMETRY: NODE_PARTITIONS})
        await log.close()

    with reachable_folder() as folder, told("all logs", lambda: file_ends(folder.glob("*.log"))):
        asyncio.run(create())
        cell = Cell(dsn, folder, release)
        try:
            yield cell
        finally:
            cell.stop()


def goes_on(cell: Cell, load: Load) -> None:
    """Returns once jobs that were submitted from now on have been placed, and have ended."""
    before = len(load.acknowledged)

    def ended() -> bool:
        cell.check()
        new = load.acknowledged[before : before + AFTER_EACH]
        with contextlib.suppress(OSError, urllib.error.URLError):
            return len(new) == AFTER_EACH and all(cell.gateway.job(job_id)["outcome"] for job_id in new)
        return False

    wait_until(ended, lambda: f"{AFTER_EACH} jobs more than {before}; there are {len(load.acknowledged)}")


def pauses_ms(dsn: str, cell: Cell) -> list[tuple[int, str]]:
    """Between two placements, by the records' own times: (duration, process that was being replaced), longest
    first."""

    async def times() -> list[int]:
        log = await open_log(dsn, "test").start()
        reader, end = log.reader({LEDGER: 0}), (await log.end_offsets([LEDGER]))[LEDGER]
        found = []
        while reader.position(LEDGER) < end:
            for record in await reader.read():
                body = read(record.value)
                if any(fact.type == "penstock.placement.decided.v1" for fact in body.facts):
                    found.append(body.now_ms)
        await reader.close()
        await log.close()
        return found

    placed = asyncio.run(times())
    longest: dict[str, int] = {}
    for before_ms, after_ms in pairwise(placed):
        name = next((name for ms, name in reversed(cell.replaced) if ms <= after_ms), "nothing")
        longest[name] = max(longest.get(name, 0), after_ms - before_ms)
    return sorted(((ms, name) for name, ms in longest.items()), reverse=True)


def releases(folder: Path) -> tuple[Release, Release, bool]:
    """Former, latter, and whether there is a way back. `PENSTOCK_FORMER`: a commit; else the latter is
    derived."""
    commit = os.environ.get("PENSTOCK_FORMER", "")
    if not commit:
        return working_tree(), next_version(folder), True
    former = of_commit(commit, folder)
    if former is None:
        pytest.skip(f"this clone does not have {commit}: `git fetch --unshallow` gets it")
    return former, working_tree(), (former.root / "libs/penstock/model/wire/additions.py").exists()


def test_each_process_is_replaced_by_the_next_version_and_back(postgres_dsn: str, tmp_path: Path) -> None:
    """A team upgrades on a working day, one service after the other, and sets all of it back in the
    afternoon. Users submit all the time, and one training runs through."""
    former, latter, back = releases(tmp_path)
    with database(postgres_dsn, "upgrade") as dsn, running(dsn, former) as cell:
        cell.gateway.until_nodes(len(NODES))
        long = cell.gateway.submit(["sleep", "infinity"])
        cell.gateway.until(long, "running")
        load = Load(cell.gateway)
        try:
            goes_on(cell, load)
            for release in (latter, former) if back else (latter,):
                for name in (*SERVICES, *NODES):
                    cell.replace(name, release)
                    goes_on(cell, load)
                    print(f"{name} is {release.name}, after {len(load.acknowledged)} jobs", flush=True)
        finally:
            load.close()
        rows = [cell.gateway.until_ended(job_id) for job_id in load.acknowledged]
        assert {row["outcome"] for row in rows} == {"succeeded"}, "acknowledged, and done"
        assert {row["attempt"] for row in rows} == {1}, "no attempt was lost"
        row = cell.gateway.job(long)
        assert (row["status"], row["attempt"]) == ("running", 1)
        cell.gateway.post(f"/v1/jobs/{long}/cancel")
        assert cell.gateway.until_ended(long)["outcome"] == "cancelled"
        report = cell.gateway.get("/v1/replay")
        assert report["records"] > 0
        pauses = ", ".join(f"{name} {ms}" for ms, name in pauses_ms(dsn, cell))
        print(f"{former.name} to {latter.name}{' and back' if back else ''}: {len(rows)} jobs, none lost")
        print(f"longest time without a placement in ms, by the process that was replaced: {pauses}")
