"""Every profile on one small trace: all jobs end, no invariant breaks, and the ledger is the same each
time."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from penstock.cluster.reasons import Reason
from penstock.scheduling import profiles
from penstock.simulator.commands.options import validate
from penstock.simulator.commands.simulate import SimulateOptions
from penstock.simulator.engine import Simulation
from penstock.why.explain import explain
from tests.support.cli.command_line import simulate_options

HEADER = (
    "job_id,submit_s,duration_s,gpus,owner,cores,host_memory_mib,gpu_share_milli,parameter_servers,workers"
)
CLUSTER = "2x4+1x8+1x2"
DRAWING = frozenset({"random"})
"""Profiles whose decisions depend on the seed in a cell of this size."""
HEADS = Path(__file__).parents[2] / "replay/golden/profiles.json"
REPEATED = (
    "random",
    "drf",
    "fgd",
    "hived",
    "kubeflow",
    "clustering",
    "srtf",
    "tiresias",
    "liquid",
    "k8s-default",
    "even",
)


def rows() -> list[str]:
    """A busy afternoon of five owners: singles, gangs, parts of GPUs, jobs without any, parameter servers."""
    found = []
    for i in range(60):
        gpus = (1, 2, 1, 4, 1, 0, 8, 3, 1, 12)[i % 10]
        share = (400, 1000, 250)[i % 3] if gpus == 1 else 1000
        servers = 1 if i % 10 == 3 else 0
        workers = 3 if gpus == 12 else ""
        cores = max(1, gpus) * (1 + i % 3)
        run_s = 20 + 37 * (i * 7 % 11)
        found.append(
            f"j{i:02},{4 * i},{run_s},{gpus},owner-{i % 5},{cores},{512 * (1 + i % 4)},"
            f"{share},{servers},{workers}"
        )
    return found


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "afternoon.csv"
    path.write_text("\n".join([HEADER, *rows()]) + "\n")
    return path


def arguments(trace: Path, profile: str, *more: str, cluster: str = CLUSTER) -> SimulateOptions:
    return simulate_options(str(trace), "--cluster", cluster, "--profile", profile, *more)


def run(trace: Path, profile: str, *more: str, cluster: str = CLUSTER) -> Simulation:
    """As `penstock simulate` does it."""
    asked = arguments(trace, profile, *more, cluster=cluster)
    given = validate(asked)
    simulation = given.simulation(profile, asked.seed, given.trace(asked.seed))
    while simulation.step():
        pass
    return simulation


@pytest.mark.parametrize("profile", profiles.names())
def test_every_profile_ends_every_job(profile: str, trace: Path) -> None:
    """Whatever a policy prefers, no job waits for ever and nothing is given twice. The ledger is the one that
    the profile always wrote: after an upgrade `penstock replay` must find every old decision again.
    """
    first = run(trace, profile, "--check")
    figures = first.figures(1, 1)
    assert (figures.finished_jobs, figures.unfinished_jobs) == (60, 0)
    assert first.meter.held == pytest.approx(0)
    assert not first.cell.state.jobs
    assert first.cell.head.id == json.loads(HEADS.read_text())[profile]
    differs = run(trace, profile, "--seed", "1").meter.lives != first.meter.lives
    assert differs == (profile in DRAWING)


@pytest.mark.parametrize("profile", profiles.names())
def test_nobody_who_waits_could_start(profile: str, trace: Path) -> None:
    """Between two events nothing is left to do: `why` never answers that a waiting job is about to start."""
    given = validate(arguments(trace, profile))
    simulation = given.simulation(profile, 0, given.trace(0))
    reasons: Counter[str] = Counter()
    while simulation.step():
        state = simulation.cell.state
        for job_id in list(state.queue.values())[:8]:
            found = explain(state, job_id)
            assert found.reason is not None
            assert (found.position, found.now_or_never) != (None, "never")
            reasons[found.reason] += 1
    assert reasons
    assert Reason.ABOUT_TO_START not in reasons


PROGRAM = """
import sys
from tests.support.cli.command_line import penstock
trace, cluster, *profiles = sys.argv[1:]
for profile in profiles:
    options = ("--cluster", cluster, "--profile", profile, "--durations", "known", "-o", "json")
    assert penstock("simulate", trace, *options) == 0
"""


def hashes(hash_seed: str, trace: Path) -> dict[str, str]:
    """By profile, the line with its ledger's hash, from one process with this hash seed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(trace), CLUSTER, *REPEATED],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "ledger_hash" in line]
    return dict(zip(REPEATED, lines, strict=True))


@pytest.fixture(scope="module")
def other_processes(trace: Path) -> list[dict[str, str]]:
    return [hashes(hash_seed, trace) for hash_seed in ("0", "4711")]


@pytest.mark.parametrize("profile", REPEATED)
def test_another_process_writes_the_same_ledger(
    profile: str, trace: Path, other_processes: list[dict[str, str]]
) -> None:
    """Sets and caches have another order under each hash seed: no decision may hang on it."""
    found = {ledgers[profile] for ledgers in other_processes}
    assert len(found) == 1
    assert run(trace, profile).cell.head.id in found.pop()
