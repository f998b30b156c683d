"""Long jobs make way for a short one on a live cell under `srtf`, save within their grace and go on where
they were."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.sdk.checkpoint import SAVED_STATUS
from tests.e2e.conftest import Installation, installed, listed, until_there
from tests.support.cli.command_process import ROOT
from tests.support.trainings.loss_file import TRAIN, check_losses, rows
from tests.support.trainings.wrappers import WRAPPERS, wrapped
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres

LIBRARY = f"PYTHONPATH={ROOT / 'libs'}"


@pytest.fixture(params=[(1, len(WRAPPERS) + 1)])
def srtf(request: pytest.FixtureRequest, place: Path) -> Iterator[Installation]:
    """So many nodes with so many GPUs each."""
    nodes, gpus = request.param
    size = ("--nodes", str(nodes), "--virtual-gpus", str(gpus), "--cores", "16")
    with installed(place, *size, PENSTOCK_PROFILE="srtf") as running:
        running.gateway.until_nodes(nodes)
        yield running


def test_preempted_jobs_lose_nothing_behind_any_wrapper_or_are_said_to(srtf: Installation) -> None:
    """The cell knows how long the short one takes, since it ran before; of the long ones, which have all
    GPUs, it knows nothing. Their loss files go on as if nobody had stopped them. One never calls
    `checkpoint()`."""
    quick = ("submit", "--name", "quick", "--gpus", str(len(WRAPPERS) + 1), "--", "true")
    assert srtf.run(*quick).returncode == 0
    end, program = srtf.home / "end", srtf.home.parent / "train.py"
    program.write_text(TRAIN)
    flags = ("--gpus", "1", "--cores", "1", "--checkpoint", "sdk", "--grace", "10m", "--env", LIBRARY)
    ids, losses = {}, {}
    for number, name in enumerate(WRAPPERS):
        losses[name] = srtf.home / f"losses-{number}"
        script = wrapped(name, f"{sys.executable} {program} {losses[name]} {end}", srtf.home)
        ids[name] = submitted(srtf, *flags, "--", "bash", "-c", script)
    mute = submitted(srtf, *flags, "--", *until_there(end))
    for name, job in ids.items():
        wait_until(lambda name=name: len(rows(losses[name])) > 9, f"9 iterations of {name}")
        assert srtf.run("checkpoint", job, "--reason", "a try").returncode == 0, name
    srtf.until(mute, "running")
    refused = srtf.run("checkpoint", mute)
    assert refused.returncode != 0
    assert "no process of it has called penstock.sdk.checkpoint" in refused.stderr
    assert srtf.run("checkpoint", "quick").returncode != 0, "it has ended"
    asked = srtf.gateway.get(f"/v1/jobs/{ids['direct']}")["checkpoint"]["iteration"]
    assert asked >= 9
    assert srtf.run(*quick).returncode == 0, "the long ones made way"
    for name in ids:
        wait_until(lambda name=name: rows(losses[name])[-1][0] == 2, f"the second attempt of {name}")
    described = srtf.run("describe", "job", ids["direct"]).stdout
    assert "saves by the SDK" in described
    assert "of attempt 1, saved in" in described
    assert "Checkpoint: iteration" in srtf.run("why", ids["direct"]).stdout
    end.touch()
    assert srtf.run("wait", *ids.values(), mute).returncode == 0
    for name, job in ids.items():
        check_losses(losses[name])
        events = listed(srtf, "events", job)["events"]
        [exited, _] = [event["data"] for event in events if event["type"] == "penstock.task.exited"]
        assert (exited["cause"], exited["detail"]) == ("stopped", ""), name
        [first, saved] = [event["data"] for event in events if event["type"] == "penstock.task.checkpointed"]
        assert saved["iteration"] == sum(attempt == 1 for attempt, _, _ in rows(losses[name])), name
        assert not [event for event in events if event["type"] == "penstock.save.refused"], name
        if name == "direct":
            assert (exited["exit_code"], first["iteration"]) == (SAVED_STATUS, asked)
    events = listed(srtf, "events", mute)["events"]
    assert [event["type"] for event in events].count("penstock.save.refused") == 2, (
        "when asked, and when stopped"
    )


def submitted(up: Installation, *arguments: str) -> str:
    """The id of the job."""
    answer = up.run("submit", "-d", *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


@pytest.mark.parametrize("srtf", [(2, 1)], indirect=True)
def test_a_job_goes_on_where_it_was_on_another_node(srtf: Installation) -> None:
    """The nodes share no folder. A job makes way on one and gets the other, later an operator moves it back:
    twice its node fetches the checkpoint from the other, and its loss file goes on. What `why` and `events`
    say of it names both nodes."""
    gates, losses, end = (srtf.home / "hold", srtf.home / "quick"), srtf.home / "losses", srtf.home / "end"
    quick = ("--name", "quick", "--gpus", "1", "--", *until_there(gates[1]))
    gates[1].touch()
    assert srtf.run("submit", *quick).returncode == 0
    gates[1].unlink()
    flags = ("--name", "long", "--gpus", "1", "--checkpoint", "sdk", "--grace", "10m", "--env", LIBRARY)
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
