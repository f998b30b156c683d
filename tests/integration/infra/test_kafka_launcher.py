"""The broker that every other Kafka test stands on: it must itself be honest about kills and leftovers."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient

from infra.devservers import build_cache
from infra.devservers.build_cache import Part, obtain
from infra.devservers.kafka import KafkaBroker, kafka_broker
from infra.devservers.processes import HIGHEST_PORT, LOWEST_PORT, Child, LaunchError, free_port
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from tests.support.waiting import wait_until

JOBS = TopicPartition(str(Topic.JOBS), 0)


async def send(broker: KafkaBroker, values: list[bytes]) -> None:
    producer = AIOKafkaProducer(acks="all", enable_idempotence=True, **broker.client_settings())
    await producer.start()
    try:
        for value in values:
            await producer.send_and_wait(JOBS.topic, value, partition=JOBS.partition)
    finally:
        await producer.stop()


async def read_all(broker: KafkaBroker) -> list[bytes]:
    consumer = AIOKafkaConsumer(
        auto_offset_reset="none", enable_auto_commit=False, **broker.client_settings()
    )
    await consumer.start()
    try:
        consumer.assign([JOBS])
        consumer.seek(JOBS, 0)
        end = (await consumer.end_offsets([JOBS]))[JOBS]
        values: list[bytes] = []
        while len(values) < end:
            fetched = await consumer.getmany(timeout_ms=1000)  # clock: then it asks again
            for records in fetched.values():
                values += [record.value for record in records]
        return values
    finally:
        await consumer.stop()


async def partitions(broker: KafkaBroker) -> dict[str, int]:
    admin = AIOKafkaAdminClient(**broker.client_settings())
    await admin.start()
    try:
        described = await admin.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in described}
    finally:
        await admin.close()


def alive(pid: int) -> bool:
    """False for a zombie too: it holds no port and no file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.kafka
async def test_a_killed_broker_comes_back_with_every_record_that_it_acknowledged(tmp_path: Path) -> None:
    """The machine's out-of-memory killer takes the broker; its clients hold the address and wait for it."""
    with kafka_broker(tmp_path / "kafka") as broker:
        broker.create_topics()
        broker.create_topics()  # a second installer is no error
        topics = await partitions(broker)
        assert topics[Topic.LEDGER] == 1
        assert topics[Topic.ORDERS] == NODE_PARTITIONS
        assert set(Topic) <= set(topics)

        sent = [f"record {number}".encode() for number in range(200)]
        await send(broker, sent)
        first_pid, bootstrap = broker.pid, broker.bootstrap
        broker.kill9()
        assert not alive(first_pid)
        await asyncio.to_thread(broker.restart)

        assert broker.bootstrap == bootstrap
        assert broker.pid != first_pid
        assert await read_all(broker) == sent
        assert LOWEST_PORT <= broker.port <= HIGHEST_PORT
    assert not alive(broker.pid)


def command_and_children(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    return [int(line) for line in found.stdout.split()]


@pytest.mark.kafka
@pytest.mark.parametrize(
    "number",
    [
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)),
        signal.SIGKILL,
    ],
    ids=lambda number: number.name,
)
def test_make_kafka_takes_its_broker_along_however_it_ends(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a CI runner's SIGTERM, or a kill -9 of the launcher: no Java process is left on the machine."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    argv = [sys.executable, "-m", "infra.devservers.kafka"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env) as launcher:
        assert launcher.stdout is not None
        announced = ""
        while "PENSTOCK_LOG" not in announced:
            line = launcher.stdout.readline()
            assert line, "the launcher ended before it announced a broker"
            announced += line
        assert "export PENSTOCK_LOG=kafka://127.0.0.1:" in announced
        (broker_pid,) = command_and_children(launcher)
        launcher.send_signal(number)
        launcher.wait()
    wait_until(lambda: not alive(broker_pid), "the end of the broker")
    if number is not signal.SIGKILL:  # nobody can tidy up after that one
        assert launcher.returncode == 0
        assert list(tmp_path.iterdir()) == []


def test_half_a_build_is_never_used_and_the_next_one_starts_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A build dies half-way (no disk, no network); the next attempt must not find its ruins."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    pin = tmp_path / "pin"
    pin.write_text("1")
    attempts: list[list[str]] = []

    def build(folder: Path) -> None:
        attempts.append([entry.name for entry in folder.iterdir()])
        (folder / "program").write_text("half")
        if len(attempts) == 1:
            raise LaunchError("the network went away")
        (folder / "program").write_text("whole")

    part = Part("turbine", "1.0", (pin,), (), "a moment", "PENSTOCK_TURBINE", build)
    with pytest.raises(LaunchError, match="network"):
        obtain(part)
    found = obtain(part)
    assert (found / "program").read_text() == "whole"
    assert obtain(part) == found
    assert attempts == [[], []], "built twice at most, each time from an empty folder"

    pin.write_text("2")
    assert obtain(part) != found, "a changed pin is another version"
    assert "building turbine 1.0 once" in capsys.readouterr().err


def test_a_missing_program_is_named_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new contributor's machine has no Go."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    needs = (("penstock-no-such-program", "Install it"),)
    part = Part("turbine", "1.0", (), needs, "a moment", "PENSTOCK_TURBINE", shutil.rmtree)
    with pytest.raises(
        LaunchError, match=r"penstock-no-such-program is missing\. Install it; or set PENSTOCK_TURBINE"
    ):
        obtain(part)
    monkeypatch.setenv("PENSTOCK_TURBINE", str(tmp_path / "nowhere"))
    with pytest.raises(LaunchError, match="names nothing"):
        obtain(part)


def test_a_server_that_dies_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    """A wrong option or an occupied port: the reader of the CI log needs the server's own message."""
    argv = [sys.executable, "-c", "import sys; sys.exit('cannot bind: occupied')"]
    child = Child("turbine", argv, log_path=tmp_path / "log")
    with pytest.raises(LaunchError, match=r"(?s)turbine exited with 1.*cannot bind: occupied"):
        child.wait_ready(lambda: False)


def test_ports_lie_below_the_range_of_outgoing_connections() -> None:
    """A client's random source port must never occupy the port that a killed broker comes back to."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(free_port() for _ in range(50)) < min(first_ephemeral, 32_000)
    assert build_cache.INFRA.is_dir()
