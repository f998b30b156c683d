"""Real launchers and frameworks under the variables that tasks find: each process has a rank and a device of
its own, and all of a job meet.

The variables are those that the placer's and the node's cores compute; members are real processes on
loopback, with gloo.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pytest

from infra.devservers import launchers
from penstock.sdk.reporter.lines import FIFO
from tests.e2e.conftest import Start
from tests.support.cli.command_process import ROOT
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec

pytestmark = pytest.mark.launchers

WORK = Path(__file__).with_name("launched") / "work.py"
ADDRESSES = ("127.0.0.2", "127.0.0.3")


class Shape(NamedTuple):
    """Of each job: workers and their GPUs, on so many nodes."""

    workers: int
    gpus: int
    nodes: int = 1
    jobs: int = 1


ONE_WORKER, ONE_NODE, TWO_NODES, TWO_JOBS = (
    Shape(1, 2),
    Shape(2, 1),
    Shape(2, 1, nodes=2),
    Shape(1, 2, jobs=2),
)
SEVERAL_GPUS = Shape(2, 2, nodes=2)


FORKS = {"PET_RUN_PATH": "1", "PET_START_METHOD": "fork"}
"""torchrun forks its processes, instead of having each of them import PyTorch again."""


def environment() -> dict[str, str]:
    """Of a machine with the frameworks, on which processes meet on loopback."""
    found = launchers.environment()
    paths = [path for path in (str(ROOT / "libs"), found.get("PYTHONPATH")) if path]
    quiet = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    quiet |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}  # DeepSpeed asks numactl otherwise
    return {**found, **quiet, "PYTHONPATH": ":".join(paths)}


class Zygote:
    """Forks members of gangs from a process that has imported the frameworks."""

    def __init__(self, home: Path) -> None:
        self.base = {**environment(), "HOME": str(home), FIFO: "/dev/null"}
        self._log = (home / "zygote").open("w")
        self._process = subprocess.Popen(
            ["python", str(WORK)],
            env=self.base,
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def run(self, members: list[tuple[dict[str, str], list[str], Path]]) -> list[int]:
        """The members' exit codes; all of them run at once."""
        asked = [(self.base | env, argv, str(output)) for env, argv, output in members]
        self._pipe(self._process.stdin).write(json.dumps(asked).encode() + b"\n")
        self._pipe(self._process.stdin).flush()
        return msgspec.json.decode(self._pipe(self._process.stdout).readline(), type=list[int])

    def end(self) -> None:
        self._pipe(self._process.stdin).close()
        assert self._process.wait() == 0
        self._log.close()

    @staticmethod
    def _pipe(found: IO[bytes] | None) -> IO[bytes]:
        assert found is not None
        return found


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    started = Zygote(tmp_path_factory.mktemp("launched"))
    yield started
    started.end()


def command(launcher: str, shape: Shape, out: Path, port: str) -> list[str]:
    """What a user of the launcher types in a job of this shape; see `libs/penstock/sdk/PYTORCH.md`."""
    work, alone = str(WORK), shape.workers == 1
    given = [str(out), str(shape.gpus), str(shape.workers)]
    match launcher:
        case "ddp":
            return [work, "spawned" if alone else "ddp", *given]
        case "torchrun":
            return ["torchrun", work, "ddp", *given]
        case "accelerate" if alone:
            flags = ("--multi_gpu", "--num_processes", str(shape.gpus), "--main_process_port", port)
            return ["accelerate", "launch", *flags, work, "accelerate", *given]
        case "deepspeed" if alone and shape.jobs == 1:
            flags = ("--num_gpus", str(shape.gpus), "--master_port", port, "--no_local_rank")
            return ["deepspeed", *flags, work, "ddp", *given]
        case "transformers" | "deepspeed" if alone:
            return ["torchrun", work, launcher, *given]
    return [work, launcher, *given]


def members(launcher: str, shape: Shape, out: Path) -> Iterator[tuple[dict[str, str], list[str], Path]]:
    """Environment, command and output of every task of the jobs, which a cell places at once."""
    driver = CellDriver()
    names = [f"job-{number}" for number in range(shape.jobs)]
    for name in names:
        driver.submit(name, job_spec(workers=shape.workers), estimate(shape.gpus))
    gpus = shape.workers * shape.gpus * shape.jobs // shape.nodes
    how = {} if launcher == "torchrun" and shape.jobs > 1 else FORKS
    for number in range(shape.nodes):
        driver.join(msgspec.structs.replace(node_spec(f"n{number}", gpus), address=ADDRESSES[number]))
    for name in names:
        for number, env in enumerate(driver.environments(name)):
            yield env | how, command(launcher, shape, out, env["MASTER_PORT"]), out / f"{name}.{number}.log"


@pytest.mark.parametrize(
    "shape",
    [ONE_WORKER, ONE_NODE, TWO_NODES, TWO_JOBS],
    ids=["one-worker", "one-node", "two-nodes", "two-jobs"],
)
@pytest.mark.parametrize(
    "launcher", ["ddp", "torchrun", "lightning", "accelerate", "transformers", "deepspeed"]
)
def test_a_launcher_finds_its_ranks(launcher: str, shape: Shape, zygote: Zygote, tmp_path: Path) -> None:
    """A user moves a script from a workstation, or from a cluster with torchrun, and changes no line of
    it."""
    meet(launcher, shape, zygote, tmp_path)


@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_a_launcher_starts_a_process_for_each_gpu_of_each_worker(
    launcher: str, zygote: Zygote, tmp_path: Path
) -> None:
    """Two nodes of several GPUs, one worker on each: the framework starts the processes, and counts ranks
    over both."""
    meet(launcher, SEVERAL_GPUS, zygote, tmp_path)


def meet(launcher: str, shape: Shape, zygote: Zygote, out: Path) -> None:
    """Runs the jobs; all processes of each have met."""
    asked = list(members(launcher, shape, out))
    codes = zygote.run(asked)
    logs = "\n".join(output.read_text() for _, _, output in asked)
    assert set(codes) == {0}, logs
    met(out, shape.jobs, shape.workers * shape.gpus, logs)


def met(out: Path, jobs: int, size: int, logs: str) -> None:
    """In each of the jobs so many processes had ranks and devices of their own and one sum, at the job's
    own port."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in out.glob("*.json"):
        each = json.loads(path.read_text())
        found.setdefault(each["job"], []).append(each)
    assert len(found) == jobs, logs
    for processes in found.values():
        assert sorted(each["rank"] for each in processes) == list(range(size)), logs
        assert {each["size"] for each in processes} == {size}
        assert {each["sum"] for each in processes} == {size * (size + 1) / 2}
        assert all(each["device"] < len(each["visible"].split(",")) for each in processes)
        assert [each["rank"] for each in processes if each["leads"]] == [0], "who reports the progress"
    assert len({each["port"] for processes in found.values() for each in processes}) == jobs


@pytest.mark.postgres
def test_three_jobs_meet_on_one_node_at_once(start: Start, place: Path) -> None:
    """Two users type `torchrun`, and a third has two workers; all of their processes are alive at once on
    a node of a live cell."""
    here = start("--nodes", "1", "--virtual-gpus", "6")
    out = place / "met"
    out.mkdir()
    env = {**environment(), **FORKS, "TOGETHER": "6"}
    flags = [word for name, text in env.items() for word in ("--env", f"{name}={text}")]
    given = (str(WORK), "ddp", str(out), "2", "1")
    torchrun, python = ("torchrun", "--nproc_per_node=2"), ("python",)
    for name, shape, program in (
        ("one", ("--gpus", "2"), torchrun),
        ("two", ("--gpus", "2"), torchrun),
        ("gang", ("--gpus", "1", "--workers", "2"), python),
    ):
        answer = here.run(
            "submit", "-d", "--name", name, "--cores", "1", *shape, *flags, "--", *program, *given
        )
        assert answer.returncode == 0, answer.stderr
    for name in ("one", "two", "gang"):
        assert here.run("wait", name).returncode == 0, here.run("logs", name).stdout
    met(out, 3, 2, here.printed())
