"""The images, and the whole product by `docker-compose.yml`, on a real podman (`make images-check`)."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from infra.devservers.build_cache import REPOSITORY
from infra.devservers.containers.compose_images import build_all, compose, tag_of
from infra.devservers.containers.podman import ContainerEngine, container_engine, missing
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.containers, pytest.mark.compose, pytest.mark.slow]

SERVICES = ("batcher", "contention-guard", "estimator", "gateway", "migrator", "placer", "projector")
NODES = ("node-0", "node-1")
HARDENED = (
    *("--read-only", "--tmpfs=/tmp", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none"),
    "--rm",
)
CANARY = "canary-of-the-images-0f7c1b"
COPIED = ("libs", "services", "schemas", "infra")
FILES = ("requirements.lock", "pyproject.toml", "README.md", "LICENSE", ".dockerignore")
SERVICES_MB = 250
START_S = 1.5
TAKEN = """
import socket, sys
taken = socket.create_server(("127.0.0.1", 8742))
print(flush=True)
sys.stdin.read()
"""
SERVER = "http://127.0.0.1:8742"


@pytest.fixture(scope="module")
def engine() -> Iterator[ContainerEngine]:
    """With all images of docker-compose.yml: 2 GB, which nobody looks at afterwards."""
    if reason := missing():
        pytest.skip(reason)
    with TemporaryDirectory(prefix="penstock-engine-") as folder, container_engine(Path(folder)) as found:
        found.import_base()
        build_all(found)
        yield found


@pytest.fixture(scope="module")
def token(engine: ContainerEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's, of a product that is up; afterwards it is down."""
    began = time.monotonic()  # clock: it is only reported
    run(engine, "up", "--wait")
    path = tmp_path_factory.mktemp("user") / "my.token"
    run(engine, "cp", "keys:/var/lib/penstock/user.token", str(path))
    path.chmod(0o600)
    penstock(engine, path, "submit", "--name", "first", "--", "sleep", "1")
    print(f"\nimages to a job's end: {time.monotonic() - began:.1f} s")  # clock: it is only reported
    yield path
    run(engine, "down", "--volumes")


def run(engine: ContainerEngine, *words: str) -> str:
    """Output of `docker compose WORDS`; with the services' last lines where it fails."""
    done = compose(engine, *words)
    if done.returncode:
        raise AssertionError(f"{words}: {done.stderr[-2_000:]}\n{compose(engine, 'logs').stdout[-6_000:]}")
    return done.stdout


def penstock(engine: ContainerEngine, token: Path, *words: str) -> str:
    """Output of `penstock WORDS` outside of the containers."""
    program = str(Path(sys.executable).with_name("penstock"))
    env = {"PENSTOCK_SERVER": SERVER, "PENSTOCK_TOKEN_FILE": str(token), "PYTHONPATH": path_of_packages()}
    done = engine.inside([program, *words], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def path_of_packages() -> str:
    return f"{REPOSITORY / 'libs'}:{REPOSITORY / 'services'}"


def submitted(engine: ContainerEngine, token: Path) -> dict[str, int]:
    """Name of each job → the ledger's record of its submission."""
    jobs = json.loads(penstock(engine, token, "get", "jobs", "-o", "json"))["jobs"]
    return {job["name"]: job["submitted_seq"] for job in jobs}


def inspected(engine: ContainerEngine, kind: str, name: str) -> dict[str, Any]:
    [found] = json.loads(engine.podman(kind, "inspect", name))
    answer: dict[str, Any] = found
    return answer


def test_the_image_of_services_is_small_and_has_no_way_to_more_rights(engine: ContainerEngine) -> None:
    """Each node of a cluster pulls it, and whoever breaks into a service finds what is in it."""
    image = inspected(engine, "image", tag_of("placer"))
    print(f"\nservices {image['Size'] / 1e6:.0f} MB, ", end="")
    print(f"node-reporter {inspected(engine, 'image', tag_of('node-0'))['Size'] / 1e6:.0f} MB")
    assert image["Size"] < SERVICES_MB * 1e6
    assert image["Config"]["User"] == "65532:65532"
    root = engine.podman("image", "mount", tag_of("placer")).strip()
    find = ["find", root, "-xdev"]
    raised = engine.inside([*find, "(", "-perm", "/6000", "-o", "-type", "f", "-perm", "/022", ")"])
    assert (raised.returncode, raised.stdout) == (0, "")
    writable = engine.inside([*find, "-type", "d", "-perm", "-o+w"]).stdout.split()
    assert [Path(place).relative_to(root).as_posix() for place in writable] == ["tmp"]
    shells = engine.inside([*find, "-name", "sh", "-o", "-name", "bash", "-o", "-name", "busybox"]).stdout
    assert shells == ""
    engine.podman("image", "unmount", tag_of("placer"))


def test_every_program_starts_without_rights_and_without_a_disk(engine: ContainerEngine) -> None:
    """A library that one service imports was taken for useless."""
    for name in ("", *(f"-{service}" for service in (*SERVICES, "node-reporter"))):
        began = time.monotonic()  # clock: it is only reported
        assert "Usage" in engine.podman("run", *HARDENED, tag_of("placer"), f"penstock{name}", "--help")
        took_s = time.monotonic() - began  # clock: it is only reported
        print(f"{'slow: ' if took_s > START_S else ''}penstock{name} --help: {took_s:.2f} s")
    worker = "import scipy.optimize, penstock_services.batcher.shell.worker, penstock_papers.profiles, faust"
    engine.podman("run", *HARDENED, tag_of("placer"), "python", "-c", worker)


def test_two_builds_are_equal_and_hold_no_secret(engine: ContainerEngine, tmp_path: Path) -> None:
    """A checkout has keys beside the code; and who builds an image again must be able to compare it."""
    checkout = tmp_path / "checkout"
    for name in COPIED:
        without = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, checkout / name, ignore=without)
    for name in FILES:
        shutil.copy(REPOSITORY / name, checkout)
    for place in (".env", ".penstock/roles/operator.key", "deploy/passwords/admin", "infra/kafka/secret"):
        path = checkout / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CANARY)
    engine.build("services", "localhost/again:1", "--no-cache", context=checkout)
    again = inspected(engine, "image", "localhost/again:1")
    assert again["RootFS"]["Layers"] == inspected(engine, "image", tag_of("placer"))["RootFS"]["Layers"]
    archive = tmp_path / "image.tar"
    engine.podman("save", "--output", str(archive), "localhost/again:1")
    found = subprocess.run(["grep", "-c", CANARY, archive], capture_output=True, text=True, check=False)
    assert found.stdout == "0\n"
    wanted = subprocess.run(["grep", "-c", "penstock-placer", archive], capture_output=True, check=False)
    assert wanted.returncode == 0, "layers of the archive are compressed, and this test sees nothing"


@pytest.mark.parametrize("service", [*SERVICES, "node-reporter"])
def test_a_missing_secret_is_a_sentence(engine: ContainerEngine, service: str) -> None:
    """A volume is not mounted: an engine starts the service again and again, and its log must be readable."""
    variable = "PENSTOCK_LOG_FILE" if service == "node-reporter" else "PENSTOCK_DSN_FILE"
    setting = f"--env={variable}=/etc/penstock/none"
    options = ["--node-id", "n1"] if service == "node-reporter" else []
    argv = ["run", *HARDENED, setting, tag_of("placer"), f"penstock-{service}", *options]
    began = time.monotonic()  # clock: it is only reported
    done = engine.inside([*engine.program(), *argv])
    print(f"{time.monotonic() - began:.1f} s: {done.stderr.strip()}")  # clock: it is only reported
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(rf"[a-z-]+: {variable}: /etc/penstock/none is missing; .*\n", done.stderr)


def test_a_job_from_outside_runs_to_its_end(engine: ContainerEngine, token: Path) -> None:
    """Somebody has cloned the repository and typed the first two commands of the compose file."""
    assert "succeeded" in penstock(engine, token, "submit", "--", "sleep", "1")
    nodes = json.loads(penstock(engine, token, "get", "nodes", "-o", "json"))
    assert {node["status"] for node in nodes["nodes"]} == {"ready"}
    print(run(engine, "--profile", "demo", "run", "--no-deps", "--rm", "demo"))


def test_every_container_is_hardened_and_healthy(engine: ContainerEngine, token: Path) -> None:
    """A line of the file that an engine does not understand would be ignored without a word."""
    for name in (*SERVICES, *NODES):
        found = inspected(engine, "container", f"penstock-{name}-1")
        assert found["State"]["Health"]["Status"] == "healthy", name
        assert found["Config"]["User"] == "65532:65532"
        host = found["HostConfig"]
        assert host["ReadonlyRootfs"], name
        assert not host["Privileged"], name
        assert "no-new-privileges" in " ".join(host["SecurityOpt"]), name
        assert found["EffectiveCaps"] in ([], None), name
        assert host["Memory"] > 0, name
        assert bool(host["PortBindings"]) == (name == "gateway"), name
        assert host["RestartPolicy"]["Name"] == "unless-stopped"
    secret = token.read_text().strip()
    assert secret not in run(engine, "logs")


def test_down_and_up_again_the_ledger_goes_on(engine: ContainerEngine, token: Path) -> None:
    """An upgrade of the engine, or of the images: keys, ledger and tables are in volumes."""
    before = submitted(engine, token)
    assert before["first"] > 0
    run(engine, "down")
    began = time.monotonic()  # clock: it is only reported
    run(engine, "up", "--wait")
    print(f"\nup again: {time.monotonic() - began:.1f} s")  # clock: it is only reported
    assert submitted(engine, token) == before
    assert "succeeded" in penstock(engine, token, "submit", "--name", "second", "--", "sleep", "1")
    assert submitted(engine, token)["second"] > max(before.values())


def test_two_placers_are_one(engine: ContainerEngine, token: Path) -> None:
    """Somebody scales every service to two."""
    run(engine, "up", "--detach", "--no-deps", "--no-recreate", "--scale", "placer=2", "placer")
    wait_until(lambda: "standing by" in run(engine, "logs", "placer"), "a placer that stands by")
    assert "succeeded" in penstock(engine, token, "submit", "--name", "with-two", "--", "sleep", "1")
    run(engine, "up", "--detach", "--no-deps", "--no-recreate", "--scale", "placer=1", "placer")


def test_a_taken_port_is_named(engine: ContainerEngine, token: Path) -> None:
    """`penstock up` runs on the same machine."""
    run(engine, "stop", "gateway")
    argv = [*engine.entered(), sys.executable, "-c", TAKEN]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        refused = compose(engine, "up", "--detach", "--no-deps", "gateway")
        assert refused.returncode != 0
        assert "8742" in refused.stderr
        assert "address already in use" in refused.stderr
        other.communicate()
    run(engine, "up", "--wait", "--no-deps", "gateway")
    assert "succeeded" in penstock(engine, token, "submit", "--name", "third", "--", "sleep", "1")


def test_the_image_of_a_clusters_reporter_has_its_command(engine: ContainerEngine) -> None:
    """In a pod with a read-only root and without capabilities, as the chart runs the image."""
    tag = "localhost/penstock/cluster-reporter:test"
    engine.build("cluster-reporter", tag)
    hardened = ("run", "--rm", "--read-only", "--cap-drop", "all", tag)
    said = engine.podman(*hardened, "penstock-node-reporter", "--backend", "kubernetes", "--help")
    assert "--kubeconfig" in said
    size_mb = int(engine.podman("image", "inspect", "--format", "{{.Size}}", tag)) / 1e6
    assert size_mb <= SERVICES_MB
