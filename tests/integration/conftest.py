"""Real servers, started once per module and only by the tests that ask for them."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.devservers.jaeger import JaegerServer, jaeger_server
from infra.devservers.kafka import KafkaBroker, kafka_broker


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine that is taken, so that nobody else gets it, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.fixture
def patient_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services in this process give no request to a broker on a busy machine up; as processes they would
    start again."""
    monkeypatch.setattr("penstock.log.kafka.retries.REQUEST_TIMEOUT_MS", 3_600_000)
    for limit in ("retries.START_LIMIT_S", "retries.DELIVERY_TIMEOUT_S", "topics.VISIBLE_LIMIT_S"):
        monkeypatch.setattr(f"penstock.log.kafka.{limit}", 3_600.0)
    monkeypatch.setattr("penstock_services.placer.shell.term.KNOWN_WITHIN_MS", 3_600_000)


@pytest.fixture(scope="module")
def guarded_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker that knows every service by name and password, with Penstock's topics and rights."""
    folder: Path = tmp_path_factory.mktemp("guarded-kafka")
    with kafka_broker(folder, security="scram") as broker:
        broker.create_topics()
        yield broker


@pytest.fixture(scope="module")
def jaeger() -> Iterator[JaegerServer]:
    """A Jaeger for a module: tests identify their traces by id."""
    with jaeger_server() as server:
        yield server
