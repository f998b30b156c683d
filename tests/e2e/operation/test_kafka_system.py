"""The whole system as separate processes on a real Kafka that knows each of them by name, gives it only the
rights of infra/kafka/acls.yaml, and encrypts every connection with a certificate of a self-made authority. In
Postgres each has a role of its own."""

import asyncio
import contextlib
import itertools
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from infra.devservers.build_cache import INFRA, REPOSITORY
from infra.devservers.certificates import make_certificates
from infra.devservers.kafka import ADMIN, KafkaBroker, kafka_broker
from infra.devservers.processes import Child, free_port
from penstock.errors import LogError, NotAllowed
from penstock.local.services import NAMES as SERVICES
from penstock.log.kafka.trouble import TROUBLE_EVERY_S
from penstock.log.open import open_log
from penstock.log.port import Message, Partition
from penstock.model.decisions.ledger_events import JobEnded, PlacementDecided
from penstock.model.schema.topics import Topic
from penstock.runtime.keys.node_keys import key_file_at
from tests.conftest import with_database
from tests.support.batching.batcher import Batcher, answered, facts
from tests.support.gateway.postgres_roles import drop_roles
from tests.support.installation.system import Gateway, clean_environment, file_ends, python_service
from tests.support.story import told
from tests.support.waiting import await_until, left_s, wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

NODES = ("n0", "n1")
LEDGER = Partition(Topic.LEDGER, 0)
A_MINUTE = timedelta(seconds=TROUBLE_EVERY_S)


class System:
    """Every service and two nodes of two virtual GPUs, each a process under its own identity."""

    def __init__(self, broker: KafkaBroker, dsn: str, folder: Path) -> None:
        self.broker = broker
        self.dsn = dsn
        self.folder = folder
        port = free_port()
        self.gateway = Gateway(f"http://127.0.0.1:{port}")
        self._bind = f"127.0.0.1:{port}"
        with ThreadPoolExecutor() as pool:
            services = [pool.submit(self._service, name, name) for name in SERVICES]
            nodes = [pool.submit(self._node, node_id) for node_id in NODES]
        self.children = [started.result() for started in (*services, *nodes)]

    def environment(self, identity: str) -> dict[str, str]:
        """The rights that infra/kafka/README.md lists for this service."""
        role = self.folder / "urls" / f"{identity}.url"
        assert role.exists() == (identity != "node-reporter")
        return clean_environment(
            **({"PENSTOCK_DSN_FILE": str(role)} if role.exists() else {}),
            PENSTOCK_LOG=self.broker.url(identity),
            PENSTOCK_GATEWAY_BIND=self._bind,
            PENSTOCK_NODE_LOG_KEY=str(key_file_at(self.folder / "logs.key")),
            PENSTOCK_OPERATOR_KEY=str(key_file_at(self.folder / "operator.key")),
        )

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def stop(self) -> dict[str, int | None]:
        """SIGTERM to all at once, as by a machine that shuts down; exit codes by name."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda child: child.stop(max(0.0, left_s())), self.children))
        return {child.log_path.stem: child.exit_code for child in self.children}

    def _service(self, name: str, identity: str, *arguments: str, log: str | None = None) -> Child:
        path = self.folder / f"{log or name}.log"
        return python_service(
            name.replace("-", "_"), arguments, log_path=path, env=self.environment(identity)
        )

    def _node(self, node_id: str) -> Child:
        arguments = ["--node-id", node_id, "--virtual-gpus", "2", "--cores", "4", "--host-memory", "8GiB"]
        arguments += ["--state-dir", str(self.folder / node_id), "--drain", "--allow-root"]
        arguments += ["--log-dir", str(self.folder / f"{node_id}-output")]
        return self._service("node_reporter", "node-reporter", *arguments, log=node_id)


@contextlib.contextmanager
def database(admin_dsn: str, name: str) -> Iterator[str]:
    async def execute(statement: str) -> None:
        connection = await asyncpg.connect(admin_dsn)
        await connection.execute(statement)
        await connection.close()

    asyncio.run(execute(f"CREATE DATABASE {name}"))
    yield with_database(admin_dsn, name)
    asyncio.run(execute(f"DROP DATABASE {name} WITH (FORCE)"))


def step(command: str, replaced: Mapping[str, str]) -> int:
    """A command of infra/kafka/README.md, word for word but for what is replaced; its exit status."""
    readme = (INFRA / "kafka" / "README.md").read_text()
    [line] = [line for line in readme.splitlines() if command in line]
    for placeholder, text in replaced.items():
        assert placeholder in line
        line = line.replace(placeholder, text)
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    argv = [sys.executable, *words[len(variables) + 1 :]]
    env = clean_environment(**variables)
    done = subprocess.run(argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode


def set_up(broker: KafkaBroker, identity: str = ADMIN) -> int:
    """Topics and rights, as step 2 has it."""
    return step("penstock.log.kafka_setup", {"kafka://admin:PASSWORD@HOST:9092": broker.url(identity)})


@contextlib.contextmanager
def roles(dsn: str, folder: Path) -> Iterator[None]:
    """Roles of Postgres, as step 2 has it: their URLs are in `folder`/urls."""
    admin = folder / "admin.url"
    admin.touch(mode=0o600)
    admin.write_text(dsn)
    replaced = {"admin.url": str(admin), "--urls urls": f"--urls {folder}/urls"}
    assert step("penstock.local.postgres_setup", replaced) == 0
    yield
    asyncio.run(drop_roles(dsn, [path.read_text().strip() for path in (folder / "urls").iterdir()]))


@pytest.fixture(scope="module")
def system(postgres_dsn: str) -> Iterator[System]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pstest-", dir="/tmp")))
        dsn = stack.enter_context(database(postgres_dsn, "kafka_system"))
        stack.enter_context(roles(dsn, folder))
        broker = stack.enter_context(kafka_broker(folder / "broker", security="tls", granted=False))
        assert set_up(broker) == 0
        assert set_up(broker) == 0, "it may be run again at any time"
        stack.enter_context(told("all logs", lambda: file_ends(folder.glob("*.log"))))
        found = System(broker, dsn, folder)
        stack.callback(found.stop)
        with told("the cell's last events", found.gateway.last_events):
            yield found
        assert found.stop() == dict.fromkeys((*SERVICES, *NODES), 0), "the machines shut down, in order"


@pytest.fixture(scope="module")
def ended(system: System) -> dict[str, dict[str, Any]]:
    """One job of every kind, by kind, after its end."""
    gateway = system.gateway
    gateway.until_nodes(len(NODES))
    flag = system.folder / "tried"
    jobs = {
        "well": gateway.submit(["true"]),
        "failed": gateway.submit(["sh", "-c", "exit 3"]),
        "gang": gateway.submit(["true"], workers=4),
        "retried": gateway.submit(
            ["sh", "-c", f"test -e {flag} || {{ touch {flag}; exit 1; }}"],
            retry={"max_attempts": 2, "backoff_ms": 10},
        ),
        "too big": gateway.submit(["true"], resources={"gpus": 3}, queue_timeout_ms=200),
        "cancelled": gateway.submit(["sleep", "infinity"]),
    }
    gateway.until(jobs["cancelled"], "running")
    gateway.post(f"/v1/jobs/{jobs['cancelled']}/cancel")
    return {kind: gateway.until_ended(job) for kind, job in jobs.items()}


def test_jobs_of_every_kind_end_as_they_should(system: System, ended: dict[str, dict[str, Any]]) -> None:
    """A team moves from one machine to its own Kafka and submits what it always submits."""
    assert {kind: (row["outcome"], row["exit_code"]) for kind, row in ended.items()} == {
        "well": ("succeeded", 0),
        "failed": ("failed", 3),
        "gang": ("succeeded", 0),
        "retried": ("succeeded", 0),
        "too big": ("timed_out_queued", None),
        "cancelled": ("cancelled", None),
    }
    assert ended["retried"]["attempt"] == 2
    tasks = system.gateway.get(f"/v1/jobs/{ended['gang']['job_id']}/tasks")["tasks"]
    assert sorted(task["node_id"] for task in tasks) == ["n0", "n0", "n1", "n1"]


@pytest.mark.usefixtures("ended")
def test_the_ledger_decides_the_same_again(system: System) -> None:
    """An auditor replays it from Kafka; the gateway's own rights are enough for that."""
    report = system.gateway.get("/v1/replay")
    assert report["ok"], report
    assert report["records"] > 30
    assert (report["different"], report["identical"]) == (0, report["records"])
    fresh = system.gateway.get("/v1/replay?fresh=true")
    assert fresh["ok"], fresh
    assert fresh["head_seq"] >= report["head_seq"]


@pytest.mark.usefixtures("ended")
def test_the_read_models_equal_a_replay(system: System) -> None:
    """The same auditor does not trust the tables either: it takes an administrator, for tables beside those
    that there are."""
    refused = system.gateway.post("/v1/projections/verify")
    assert "give an administrator's URL" in refused["error"], "the gateway's own role may not"
    argv = [sys.executable, "-m", "penstock_services.projector", "verify"]
    env = {**system.environment("projector"), "PENSTOCK_DSN_FILE": str(system.folder / "admin.url")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]


@pytest.mark.parametrize("identity", ["gateway", "estimator", "projector", "node-reporter"])
async def test_nobody_but_the_placer_writes_the_ledger_meanwhile(system: System, identity: str) -> None:
    """A wrong line in a service's code, while everything runs: the broker refuses, the chain is untouched."""
    log = await open_log(system.broker.url(identity), identity).start()
    admin = await open_log(system.broker.url("admin"), "admin").start()
    try:
        before = await admin.end_offsets([LEDGER])
        with pytest.raises(NotAllowed):
            await log.append([Message(LEDGER, b"{}")])
        assert await admin.end_offsets([LEDGER]) == before
    finally:
        await log.close()
        await admin.close()


@pytest.mark.usefixtures("ended")
def test_operators_command_nodes_with_the_key_of_the_cell(system: System) -> None:
    """Gateway and placer share a key; what others write is refused in
    tests/integration/log/test_kafka_acls.py."""
    for act in ("cordon", "uncordon"):
        assert system.gateway.post(f"/v1/nodes/n0/{act}", {"reason": "fans"})["applied"]


def test_only_an_administrator_gives_rights(system: System) -> None:
    """Somebody runs the set-up with the gateway's password, which lies nearer at hand."""
    assert set_up(system.broker, "gateway") == 1


def test_a_service_under_a_wrong_identity_says_so_and_ends(system: System) -> None:
    """Two secrets were mixed up in a deployment: the first line of the log must be enough to see it."""
    argv = [sys.executable, "-m", "penstock_services.placer"]
    done = subprocess.run(
        argv, env=system.environment("estimator"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "placer: placer (as estimator) may neither read nor write penstock.nodes.v1\n"


def test_a_certificate_of_a_stranger_is_refused_at_once(system: System, tmp_path: Path) -> None:
    """An attacker between us and the broker shows a certificate of his own, or a new authority was not given
    out everywhere."""
    make_certificates(tmp_path)
    url = system.broker.url("projector").replace(str(system.broker.ca), str(tmp_path / "ca.pem"))
    argv = [sys.executable, "-m", "penstock_services.projector"]
    env = system.environment("projector") | {"PENSTOCK_LOG": url}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert f"the certificate of {system.broker.bootstrap} is not accepted" in done.stderr
    assert str(tmp_path / "ca.pem") in done.stderr
    assert system.broker.passwords["projector"] not in done.stderr


async def test_nothing_is_said_in_clear(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL without `?ca=` meets a listener that encrypts: it gets nowhere, with the password of an
    administrator."""
    monkeypatch.setattr("penstock.log.kafka.retries.START_LIMIT_S", 1.0)
    url, _, _ = system.broker.url(ADMIN).partition("?")
    with pytest.raises(LogError, match="cannot be reached as admin"):
        await open_log(url, "admin").start()


def complaints(system: System) -> dict[str, list[str]]:
    """Lines of each process's log that an operator would have to look into."""
    words = ("WARNING", "ERROR", "Traceback", "Unclosed")
    names = [child.log_path.stem for child in system.children]
    return {
        name: [line for line in system.log_of(name).splitlines() if any(word in line for word in words)]
        for name in names
    }


@pytest.mark.usefixtures("ended")
def test_nobody_complains_and_a_restarted_broker_is_sat_out_with_one_line(system: System) -> None:
    """Nothing was wrong so far: what a log warns of must be worth reading. Then the cluster is upgraded:
    nobody ends, jobs go on, and no log is flooded: it has at most a line a minute, and one in all where the
    outage is short."""
    assert complaints(system) == {child.log_path.stem: [] for child in system.children}
    system.broker.restart()
    job_id = system.gateway.submit(["true"])
    assert system.gateway.until_ended(job_id)["outcome"] == "succeeded"
    wait_until(lambda: any(complaints(system).values()), "somebody to notice")
    for lines in complaints(system).values():
        assert all("Kafka: " in line for line in lines), lines
        at = [datetime.fromisoformat(line[:23]) for line in lines]
        assert all(after - before > A_MINUTE / 2 for before, after in pairwise(at)), lines


async def test_a_plan_is_carried_out_unit_by_unit(system: System) -> None:
    """A batcher plans for who waits while all GPUs are being freed: each unit is ordered whole and where it
    was proposed, and starts when its node has seen who was there end, or is refused by itself. Nothing is
    done twice, late, or for a plan that is too large."""
    gateway, gate, ready = system.gateway, system.folder / "gate", system.folder / "ready"
    saves = (
        f"trap 'while ! test -e {gate}; do sleep 0.05; done; exit 1' TERM; touch {ready}.$RANK; while :; do "
        "sleep 0.05; done"
    )
    holds = gateway.submit(
        ["sh", "-c", saves], workers=4, resources={"gpus": 1, "cores": 1}, grace_ms=600_000
    )
    gateway.until(holds, "running")
    traps = [ready.with_name(f"ready.{rank}") for rank in range(4)]
    await await_until(lambda: all(path.exists() for path in traps), "the traps of all four")
    waiting = [
        gateway.submit(["true"], workers=workers, resources={"gpus": 1, "cores": 1})
        for workers in (2, 1, 1, 1)
    ]
    gang, one, two, last = waiting
    gateway.until(last, "queued")
    gateway.post(f"/v1/jobs/{holds}/cancel")
    gateway.until(holds, "stopping")
    units = [[(gang, "n1", "n1")], [(one, "n0"), (two, "n0")], [(last, "n9")]]
    async with Batcher(system.broker.url("batcher")) as batcher:
        late = answered(await batcher.send("late", [(gang, "n0", "n0")], valid_until_ms=1))
        assert (late.verdict, late.reason) == ("refused", "expired")
        assert "valid until 1," in late.detail
        large = [[(f"{gang}-{number:03}", "n0")] for number in range(250)]
        letter = await batcher.send("large", *large, why="x" * 1_024)
        assert (letter.outcome, letter.facts) == ("dead_lettered", ())
        assert re.match(
            r"too_large: data: \d+ bytes exceed 262144, the bound of penstock.plan.proposed",
            letter.reason or "",
        )
        first = await batcher.send("plan", *units)
        found = answered(first)
        assert (found.verdict, found.started, found.waiting) == ("accepted", 2, 0)
        [refused] = found.refused
        assert (refused.unit, refused.reason, "n9: no such node" in refused.detail) == (2, "infeasible", True)
        again = await batcher.send("plan", *units)
        assert (answered(again).copy_of, answered(again).verdict) == (first.seq, "accepted")
        assert len(again.facts) == 2, "the proposal and the answer, nothing else"
        for job_id in (gang, one, two):
            await asyncio.to_thread(gateway.until, job_id, "launching")
            why = gateway.get(f"/v1/jobs/{job_id}/why")
            assert (why["status"], why["reason"]) == ("launching", "awaiting_stops")
        gate.touch()
        for job_id in waiting:
            assert (await asyncio.to_thread(gateway.until_ended, job_id))["outcome"] == "succeeded"
        await batcher.until(lambda record: any(fact.job_id == last for fact in facts(record, JobEnded)))
        placed = [fact for record in batcher.records for fact in facts(record, PlacementDecided)]
        where = {fact.job_id: [place.node_id for place in fact.tasks] for fact in placed}
        assert sorted(fact.job_id for fact in placed) == sorted(waiting), "each once"
        after = {fact.job_id: fact.after for fact in placed}
        assert after == {gang: (holds,), one: (holds,), two: (holds,), last: ()}
        assert (where[gang], where[one], where[two]) == (["n1", "n1"], ["n0"], ["n0"])
        refs = {fact.job_id: fact.unit and (fact.unit.proposal_id, fact.unit.unit) for fact in placed}
        assert refs == {gang: ("plan", 0), one: ("plan", 1), two: ("plan", 1), last: None}
        records = {
            fact.job_id: record.seq for record in batcher.records for fact in facts(record, PlacementDecided)
        }
        assert records[one] == records[two]
    why = gateway.get(f"/v1/jobs/{gang}/why")["placement"]
    assert (why["proposer"], why["reason"]) == ("batcher", "shares no link")
