"""A job whose loss hardly falls any more makes room on a live cell under `specon`: the migrator proposes it, the placer carries it out."""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Installation, eventually, installed, listed
from tests.support.command_process import ROOT
from tests.support.loss_file import TRAIN, check_losses, rows

pytestmark = pytest.mark.postgres

INTERVAL_MS = 5_000


@pytest.fixture
def specon() -> Iterator[Installation]:
    """Two nodes with three GPUs each."""
    convergence = json.dumps({"interval_ms": INTERVAL_MS})
    env = {"PENSTOCK_PROFILE": "specon", "PENSTOCK_CONVERGENCE": convergence}
    with installed("--nodes", "2", "--virtual-gpus", "3", **env) as running:
        yield running


def test_a_converged_job_goes_on_elsewhere_and_loses_nothing(specon: Installation) -> None:
    """Three on one node, two on the other. It moves once, goes on where it was, and everybody sees why; the others stay."""
    eventually(lambda: len(listed(specon, "get", "nodes")["nodes"]) == 2, "no second node")  # type: ignore[arg-type]
    end = specon.home / "end"
    library = f"PYTHONPATH={ROOT / 'libs'}"
    for number, name in enumerate(("slow", "b", "c", "d", "e")):
        flags = ("--name", name, "--gpus", "1", "--checkpoint", "sdk", "--grace", "30s", "--env", library)
        kind = () if name == "slow" else ("gains",)
        command = ("--", sys.executable, "-c", TRAIN, str(specon.home / name), str(end), *kind)
        answer = specon.run("submit", "-d", *flags, *command)
        assert answer.returncode == 0, answer.stderr
        eventually(lambda name=name: len(rows(specon.home / name)) > 1, f"{number} does not train")  # type: ignore[misc]
    [first] = listed(specon, "describe", "job", "slow")["nodes"]  # type: ignore[misc]
    eventually(lambda: rows(specon.home / "slow")[-1][0] == 2, "it does not move")
    slow = listed(specon, "describe", "job", "slow")
    [there] = slow["nodes"]  # type: ignore[misc]
    assert there != first
    why = " ".join(specon.run("why", "slow").stdout.split())
    assert f"Move: to {there}, asked for by migrator" in why, why
    assert "its loss falls slower and slower" in why
    assert f"moved from {first}; its stop took " in why
    done = len(rows(specon.home / "slow"))
    eventually(lambda: len(rows(specon.home / "slow")) > done + 100, "it does not train on")
    end.touch()
    eventually(lambda: listed(specon, "describe", "job", "slow")["outcome"] == "succeeded", "it does not end")
    check_losses(specon.home / "slow")
    shown = json.loads(specon.run("events", "slow", "-o", "json").stdout)["events"]
    kinds = [event["type"] for event in shown]
    assert kinds.count("penstock.job.converged") == kinds.count("penstock.move.decided") == 1
    assert "converged" in specon.run("events", "slow").stdout
    assert {rows(specon.home / name)[-1][0] for name in "bcde"} == {1}, "nobody else was restarted"
    [moved] = [event["data"] for event in shown if event["type"] == "penstock.move.decided"]
    assert moved["cause"] == "converged"
