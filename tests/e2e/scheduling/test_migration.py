"""A job whose loss hardly falls any more makes room on a live cell under `specon`: the migrator proposes it,
the placer carries it out."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Installation, installed, listed
from tests.support.cli.command_process import ROOT
from tests.support.trainings.loss_file import TRAIN, check_losses, rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres

INTERVAL_MS = 5_000


@pytest.fixture
def specon(place: Path) -> Iterator[Installation]:
    """Two nodes with three GPUs each."""
    convergence = json.dumps({"interval_ms": INTERVAL_MS})
    env = {"PENSTOCK_PROFILE": "specon", "PENSTOCK_CONVERGENCE": convergence}
    with installed(place, "--nodes", "2", "--virtual-gpus", "3", **env) as running:
        yield running


def train(up: Installation, name: str, *kind: str) -> str:
    """The node on which the job of this name trains until the file `end` is there."""
    flags = (
        "--name",
        name,
        "--gpus",
        "1",
        "--checkpoint",
        "sdk",
        "--grace",
        "10m",
        "--env",
        f"PYTHONPATH={ROOT / 'libs'}",
    )
    command = ("--", sys.executable, "-c", TRAIN, str(up.home / name), str(up.home / "end"), *kind)
    answer = up.run("submit", "-d", *flags, *command)
    assert answer.returncode == 0, answer.stderr
    [node] = up.until(name, "running")["nodes"]
    wait_until(lambda: len(rows(up.home / name)) > 1, f"{name} to train")
    return str(node)


def test_a_converged_job_goes_on_elsewhere_and_loses_nothing(specon: Installation) -> None:
    """Three on one node, one on the other, so that this one has the lowest score whether or not its
    neighbours were just watched. It moves once, goes on where it was, and everybody sees why; the others
    stay."""
    specon.gateway.until_nodes(2)
    assert specon.run("node", "cordon", "node-1").returncode == 0
    wait_until(lambda: listed(specon, "get", "nodes")["nodes"][1]["cordon"], "the cordon")
    assert [train(specon, name, *kind) for name, *kind in (("slow",), ("b", "gains"), ("c", "gains"))] == [
        "node-0"
    ] * 3
    assert specon.run("node", "uncordon", "node-1").returncode == 0
    assert train(specon, "d", "gains") == "node-1", "with fewer jobs"
    wait_until(lambda: rows(specon.home / "slow")[-1][0] == 2, "its second attempt")
    assert listed(specon, "describe", "job", "slow")["nodes"] == ["node-1"]
    why = " ".join(specon.run("why", "slow").stdout.split())
    assert "Move: to node-1, asked for by migrator" in why, why
    assert "its loss converges" in why
    assert "moved from node-0; its stop took " in why
    done = len(rows(specon.home / "slow"))
    wait_until(lambda: len(rows(specon.home / "slow")) > done + 20, "more iterations")
    (specon.home / "end").touch()
    assert specon.run("wait", "slow").returncode == 0
    check_losses(specon.home / "slow")
    shown = listed(specon, "events", "slow")["events"]
    kinds = [event["type"] for event in shown]
    assert kinds.count("penstock.job.converged") == kinds.count("penstock.move.decided") == 1
    assert "converged" in specon.run("events", "slow").stdout
    assert {rows(specon.home / name)[-1][0] for name in "bcd"} == {1}, "nobody else was restarted"
    [moved] = [event["data"] for event in shown if event["type"] == "penstock.move.decided"]
    assert moved["cause"] == "converged"
