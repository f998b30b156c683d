"""Real containers without a container engine's daemon: podman in namespaces and a folder of its own.

    with container_engine(folder) as engine:
        engine.build("services", tag)
        engine.podman("run", "--rm", tag, "penstock", "--version")

Nothing of the machine's own podman, networks or containers is touched: storage lies in `folder`, networks and
processes in namespaces that end with the block. Its Docker API is at `engine.socket`, for Compose.

Departures from a machine with systemd: cgroups are version 1, since the recipe takes the hybrid hierarchy
away, and no timer runs health checks, so that `engine` asks for each that is not healthy.
"""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.devservers.build_cache import INFRA, REPOSITORY, Part, build_environment, obtain
from infra.devservers.processes import Child, LaunchError, run_to_end

PROGRAMS = ("podman", "crun", "debootstrap", "nsenter", "unshare")
RECIPE = (
    "containers need root on Linux, and: apt-get install -y podman crun debootstrap netavark aardvark-dns "
    "catatonit"
)
BASE_PACKAGES = INFRA / "images" / "base-packages"
PACKAGES = INFRA / "images" / "packages"
LOCK = REPOSITORY / "requirements.lock"
BASE = "localhost/penstock-base:1"
SUITE = "bookworm"
BUILD_TIMEOUT_S = 1_800.0
CHECK_S = 1.0  # between two health checks of the same container
TIMESTAMP = "315532800"  # 1980: the earliest time that a ZIP archive, such as a wheel, can name
LEFT_OUT = (
    "var/cache/apt/*",
    "var/lib/apt/lists/*",
    "usr/share/doc/*",
    "usr/share/man/*",
    "usr/share/locale/*",
    "dev/*",
)
"""Parts of a bootstrapped Debian that slim images lack, too."""
SETTINGS = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
runtime = "crun"
events_logger = "file"
[network]
network_backend = "netavark"
"""
SERVE = """
mount --make-rprivate /
umount -R /sys/fs/cgroup/unified 2>/dev/null
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /etc/containers
echo '{"default": [{"type": "insecureAcceptAnything"}]}' > /etc/containers/policy.json
ip link set lo up
"$@" &
wait
"""
"""First process of the namespaces: dash, which reaps the orphans of containers."""


def missing() -> str:
    """Why no container can run here, with the remedy; empty: they can."""
    lacking = [program for program in PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0 or lacking:
        return f"{RECIPE} ({', '.join(lacking) or 'not root'})"
    return ""


def obtain_base() -> Path:
    """A tar file with a minimal Debian and its Python, made once. Raises `LaunchError` with the remedy."""
    packages = [line for line in BASE_PACKAGES.read_text().split("\n") if line and not line.startswith("#")]

    def build(folder: Path) -> None:
        tree = folder / "tree"
        argv = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", SUITE, str(tree)]
        log = folder / "build.log"
        run_to_end("debootstrap", argv, log_path=log, timeout_s=BUILD_TIMEOUT_S, env=build_environment())
        without = [f"--exclude=./{part}" for part in LEFT_OUT]
        run_to_end(
            "tar", ["tar", "-C", str(tree), *without, "-cf", str(folder / "base.tar"), "."], log_path=log
        )
        shutil.rmtree(tree)

    part = Part(
        name="image-base",
        version=SUITE,
        pins=(BASE_PACKAGES,),
        needs=(("debootstrap", RECIPE),),
        expected="about 90 seconds",
        override="PENSTOCK_IMAGE_BASE",
        build=build,
    )
    found = obtain(part)
    return found / "base.tar" if found.is_dir() else found


def obtain_wheels() -> Path:
    """Folder of the locked packages' wheels, so that an image is built without a network. Raises
    `LaunchError`."""

    def build(folder: Path) -> None:
        wanted = {line for line in PACKAGES.read_text().split("\n") if line and line[0] not in "#["}
        kept, keep = [], False
        for line in LOCK.read_text().splitlines():
            if line[:1].isalnum():
                keep = line.partition("==")[0] in wanted
            kept += [line] if keep else []
        (folder / "locked").write_text("\n".join(kept))
        argv = ["python3", "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        argv += ["--require-hashes", "-r", str(folder / "locked"), "-d", str(folder / "wheels")]
        run_to_end("pip", argv, log_path=folder / "build.log", timeout_s=BUILD_TIMEOUT_S)

    part = Part(
        name="image-wheels",
        version="3.11",
        pins=(PACKAGES, LOCK),
        needs=(),
        expected="about 30 seconds",
        override="PENSTOCK_IMAGE_WHEELS",
        build=build,
    )
    found = obtain(part)
    return found / "wheels" if (found / "wheels").is_dir() else found


def obtain_containers() -> Path:
    """All that container tests need, made once. Raises `LaunchError` with the remedy."""
    if reason := missing():
        raise LaunchError(reason)
    obtain_wheels()
    return obtain_base()


class ContainerEngine:
    """One podman with its own storage, networks and processes."""

    def __init__(self, folder: Path) -> None:
        """Starts its API. Raises `LaunchError`."""
        self._folder = folder
        self.socket = folder / "podman.sock"
        (folder / "containers.conf").write_text(SETTINGS)
        (folder / "serve.sh").write_text(SERVE)
        self._env = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf"), "HOME": str(folder)}
        argv = [
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            str(folder / "serve.sh"),
        ]
        argv += [*self.program(), "system", "service", "--time=0", f"unix://{self.socket}"]
        self._holder = Child("podman", argv, log_path=folder / "podman.log", env=self._env)
        self._holder.wait_ready(self._answers)
        self._ended = threading.Event()
        self._checks = threading.Thread(target=self._check_health, name="health checks", daemon=True)
        self._checks.start()

    def podman(self, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Output of `podman WORDS`. Raises `LaunchError` with its errors."""
        done = self.inside([*self.program(), *words], env=env)
        if check and done.returncode:
            raise LaunchError(f"podman {words[0]} ended with {done.returncode}:\n{done.stderr[-4_000:]}")
        return done.stdout

    def inside(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program beside the containers: on their machine, and in none of them."""
        return subprocess.run(
            [*self.entered(), *argv],
            capture_output=True,
            text=True,
            check=False,
            env={**self._env, **(env or {})},
        )

    def entered(self) -> list[str]:
        """What precedes a program that is to run there."""
        return ["nsenter", "--target", str(self._init()), "--mount", "--net", "--pid", "--"]

    def import_base(self) -> None:
        """The base image of all others here."""
        self.podman("import", str(obtain_base()), BASE)

    def build(self, target: str, tag: str, *options: str, context: Path = REPOSITORY) -> None:
        """Builds a target of infra/images/Dockerfile, without a network. Raises `LaunchError`.

        `context`: a checkout.
        """
        argv = ["build", "--network=none", f"--timestamp={TIMESTAMP}", f"--build-arg=BASE={BASE}", *options]
        argv += ["--build-arg=PIP_NO_INDEX=1", "--build-arg=PIP_FIND_LINKS=/wheels"]
        argv += [f"--volume={obtain_wheels()}:/wheels:ro", f"--target={target}", f"--tag={tag}"]
        self.podman(*argv, f"--file={context / 'infra' / 'images' / 'Dockerfile'}", str(context))

    def close(self) -> None:
        """Removes all containers, which have control groups on this machine, and ends podman."""
        self._ended.set()
        self._checks.join()
        with contextlib.suppress(LaunchError):
            self.podman("rm", "--all", "--force", "--time=0")
        self._holder.kill9()
        for group in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
            with contextlib.suppress(OSError):  # another podman's containers are in there
                group.rmdir()

    def program(self) -> list[str]:
        """How this podman is called, in its namespaces."""
        return ["podman", f"--root={self._folder / 'root'}", f"--runroot={self._folder / 'run'}"]

    def _init(self) -> int:
        """Of the namespaces: the child of `unshare --fork`."""
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        if not children:
            raise LaunchError(f"podman ended:\n{self._holder.log_tail()}")
        return int(children[0])

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self.ask("/_ping") is not None
        return False

    def ask(self, path: str) -> Any:
        """The answer of podman's own API; None: refused."""
        connection = _OverSocket(self.socket)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read()
            return json.loads(content) if content[:1] in (b"[", b"{") else content.decode()
        finally:
            connection.close()

    def _check_health(self) -> None:
        """As systemd's timers do, of containers that are not healthy."""
        while not self._ended.wait(CHECK_S):
            with contextlib.suppress(OSError, http.client.HTTPException):
                for container in self.ask("/v4.0.0/libpod/containers/json"):
                    if "starting" in container["Status"] or "unhealthy" in container["Status"]:
                        self.ask(f"/v4.0.0/libpod/containers/{container['Id']}/healthcheck")


class _OverSocket(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


@contextlib.contextmanager
def container_engine(folder: Path) -> Iterator[ContainerEngine]:
    """A started engine; afterwards neither container nor process is left. Raises `LaunchError`."""
    if reason := missing():
        raise LaunchError(reason)
    engine = ContainerEngine(folder)
    try:
        yield engine
    finally:
        engine.close()
