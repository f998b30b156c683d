"""A long job makes way for a short one on a live cell under `srtf`, saves within its grace and goes on where it was."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.sdk.checkpoint import SAVED_STATUS
from tests.e2e.conftest import Installation, installed, listed, until_there
from tests.support.command_process import ROOT
from tests.support.loss_file import TRAIN, check_losses, rows
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres


@pytest.fixture(params=[1])
def srtf(request: pytest.FixtureRequest, place: Path) -> Iterator[Installation]:
    """Nodes with one GPU each."""
    size = ("--nodes", str(request.param), "--virtual-gpus", "1")
    with installed(place, *size, PENSTOCK_PROFILE="srtf") as running:
        running.gateway.until_nodes(request.param)
        yield running


def test_a_preempted_job_loses_nothing(srtf: Installation) -> None:
    """The cell knows how long the short one takes, since it ran before; of the long one it knows nothing. Its loss file goes on as if
    nobody had stopped it."""
    quick = ("submit", "--name", "quick", "--gpus", "1", "--", "true")
    assert srtf.run(*quick).returncode == 0
    losses, end = srtf.home / "losses", srtf.home / "end"
    library = f"PYTHONPATH={ROOT / 'libs'}"
    flags = ("--name", "long", "--gpus", "1", "--checkpoint", "sdk", "--grace", "10m", "--env", library)
    answer = srtf.run("submit", "-d", *flags, "--", sys.executable, "-c", TRAIN, str(losses), str(end))
    assert answer.returncode == 0, answer.stderr
    wait_until(lambda: len(rows(losses)) > 20, "20 iterations")
    srtf.until("long", "running")
    assert srtf.run("checkpoint", "long", "--reason", "a try").returncode == 0
    wait_until(lambda: listed(srtf, "describe", "job", "long")["checkpoint"], "its checkpoint")
    asked = listed(srtf, "describe", "job", "long")["checkpoint"]
    assert asked["iteration"] > 20
    assert srtf.run("checkpoint", "quick").returncode != 0, "it has ended"
    assert srtf.run(*quick).returncode == 0, "the long one made way"
    wait_until(lambda: rows(losses)[-1][0] == 2, "its second attempt")
    described = srtf.run("describe", "job", "long").stdout
    assert "saves by the SDK" in described
    assert "of attempt 1, saved in" in described
    assert "Checkpoint: iteration" in srtf.run("why", "long").stdout
    end.touch()
    assert srtf.run("wait", "long").returncode == 0
    check_losses(losses)
    found = rows(losses)
    events = listed(srtf, "events", "long")["events"]
    [exited, _] = [event["data"] for event in events if event["type"] == "penstock.task.exited"]
    assert (exited["cause"], exited["exit_code"]) == ("stopped", SAVED_STATUS)
    [first, saved] = [event["data"] for event in events if event["type"] == "penstock.task.checkpointed"]
    assert first["iteration"] == asked["iteration"]
    assert saved["iteration"] == sum(attempt == 1 for attempt, _, _ in found)


@pytest.mark.parametrize("srtf", [2], indirect=True)
def test_a_job_goes_on_where_it_was_on_another_node(srtf: Installation) -> None:
    """The nodes share no folder. A job makes way on one and gets the other, later an operator moves it back: twice its node fetches the
    checkpoint from the other, and its loss file goes on. What `why` and `events` say of it names both nodes."""
    gates, losses, end = (srtf.home / "hold", srtf.home / "quick"), srtf.home / "losses", srtf.home / "end"
    quick = ("--name", "quick", "--gpus", "1", "--", *until_there(gates[1]))
    gates[1].touch()
    assert srtf.run("submit", *quick).returncode == 0
    gates[1].unlink()
    library = f"PYTHONPATH={ROOT / 'libs'}"
    flags = ("--name", "long", "--gpus", "1", "--checkpoint", "sdk", "--grace", "10m", "--env", library)
    answer = srtf.run("submit", "-d", *flags, "--", sys.executable, "-c", TRAIN, str(losses), str(end))
    assert answer.returncode == 0, answer.stderr
    wait_until(lambda: len(rows(losses)) > 20, "20 iterations")
    [first] = listed(srtf, "describe", "job", "long")["nodes"]
    [other] = {node["node_id"] for node in listed(srtf, "get", "nodes")["nodes"]} - {first}
    hold = ("--name", "hold", "--gpus", "1", "--no-preemptible", "--", *until_there(gates[0]))
    assert srtf.run("submit", "-d", *hold).returncode == 0
    srtf.until("hold", "running")
    assert srtf.run("submit", "-d", *quick).returncode == 0
    assert srtf.until("quick", "running")["nodes"] == [first], "who makes way"
    gates[0].touch()
    wait_until(lambda: rows(losses)[-1][0] == 2, "its second attempt")
    assert listed(srtf, "describe", "job", "long")["nodes"] == [other]
    assert f"on {other}, fetched from {first}" in " ".join(srtf.run("why", "long").stdout.split())
    gates[1].touch()
    assert srtf.run("wait", "quick").returncode == 0
    assert srtf.run("move", "long", "--to", first).returncode == 0
    wait_until(lambda: rows(losses)[-1][0] == 3, "its third attempt")
    end.touch()
    assert srtf.run("wait", "long").returncode == 0
    check_losses(losses)
    events = listed(srtf, "events", "long")["events"]
    fetched = [event["data"] for event in events if event["type"] == "penstock.task.checkpoint_fetched"]
    assert [(data["from_node"], data["node_id"]) for data in fetched] == [(first, other), (other, first)]
    saved = [event["data"]["iteration"] for event in events if event["type"] == "penstock.task.checkpointed"]
    assert [data["iteration"] for data in fetched] == saved
    assert f"has iteration {saved[0]:,} from {first}" in " ".join(srtf.run("events", "long").stdout.split())
