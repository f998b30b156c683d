"""A moldable job on a live cell: two workers beside another job, four in its next attempt, which goes on at
the checkpoint of the first."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ENDLESS, Installation, installed, listed
from tests.support.cli.command_process import ROOT
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres

TRAIN = """
import json, os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

place = pathlib.Path(sys.argv[1])
state = {"done": 0}

def save(path):
    pathlib.Path(path, "state.json").write_text(json.dumps(state))

def restore(path):
    state.update(json.loads(pathlib.Path(path, "state.json").read_text()))

checkpoint(save, restore)
names = ("RANK", "WORLD_SIZE", "PENSTOCK_BATCH_SIZE", "PENSTOCK_GLOBAL_BATCH_SIZE")
peers = json.loads(os.environ["PENSTOCK_PEERS"])
found = {name: int(os.environ[name]) for name in names} | {"begins": state["done"], "peers": len(peers)}
attempt = os.environ["PENSTOCK_ATTEMPT"]
written = place / f"{attempt}.{found['RANK']}.new"  # a name of its own: the workers start at the same moment
written.write_text(json.dumps(found))
written.rename(written.with_suffix(".json"))
while not (place / "end").exists():
    state["done"] += 1
    time.sleep(0.02)
    progress(state["done"])
    if attempt == "1" and (place / "fail").exists():
        sys.exit(1)
"""


@pytest.fixture
def four_gpus(place: Path) -> Iterator[Installation]:
    with installed(place, "--nodes", "1", "--virtual-gpus", "4") as running:
        yield running


def workers(place: Path, attempt: int) -> list[dict[str, int]]:
    """What the workers of an attempt found, by rank."""
    found = [json.loads(path.read_text()) for path in place.glob(f"{attempt}.*.json")]
    return sorted(found, key=lambda one: one["RANK"])


def test_the_next_attempt_has_more_workers_and_the_same_batch(
    four_gpus: Installation,
) -> None:
    """66 samples an iteration, over two workers and then over four, 17 and 16 each; no sample is lost, and
    rank 0's checkpoint serves both shapes."""
    here = four_gpus
    held = ("submit", "-d", "--name", "held", "--gpus", "1", "--workers", "2", "--", *ENDLESS)
    assert here.run(*held).returncode == 0
    here.until("held", "running")
    place = here.home / "seen"
    place.mkdir()
    flags = (
        "--name",
        "mold",
        "--gpus",
        "1",
        "--workers",
        "4",
        "--min-workers",
        "1",
        "--global-batch-size",
        "66",
        "--max-attempts",
        "2",
        "--checkpoint",
        "sdk",
        "--env",
        f"PYTHONPATH={ROOT / 'libs'}",
    )
    answer = here.run("submit", "-d", *flags, "--", sys.executable, "-c", TRAIN, str(place))
    assert answer.returncode == 0, answer.stderr
    wait_until(lambda: len(workers(place, 1)) == 2, "both workers")
    first = workers(place, 1)
    assert [(one["RANK"], one["WORLD_SIZE"], one["peers"]) for one in first] == [(0, 2, 2), (1, 2, 2)]
    assert [one["PENSTOCK_BATCH_SIZE"] for one in first] == [33, 33]
    assert "2 of 1 to 4 workers: as many as fit now" in here.run("why", "mold").stdout
    assert "2 of 1 to 4 workers" in here.run("describe", "job", "mold").stdout
    assert here.run("checkpoint", "mold", "--reason", "before it fails").returncode == 0
    wait_until(lambda: listed(here, "describe", "job", "mold")["checkpoint"], "its checkpoint")
    assert here.run("cancel", "held").returncode == 0
    here.until("held", "cancelled")
    (place / "fail").touch()
    wait_until(lambda: len(workers(place, 2)) == 4, "all four workers")
    second = workers(place, 2)
    assert [(one["RANK"], one["WORLD_SIZE"], one["peers"]) for one in second] == [
        (rank, 4, 4) for rank in range(4)
    ]
    assert [one["PENSTOCK_BATCH_SIZE"] for one in second] == [17, 17, 16, 16]
    assert {one["PENSTOCK_GLOBAL_BATCH_SIZE"] for one in second} == {66}
    (place / "end").touch()
    assert here.run("wait", "mold").returncode == 0
    saved = [
        event["data"]
        for event in listed(here, "events", "mold")["events"]
        if event["type"] == "penstock.task.checkpointed"
    ]
    of_rank_0 = [one["iteration"] for one in saved if one["task_id"].endswith(".1.w0")]
    assert {one["begins"] for one in second} == {of_rank_0[-1]}, (
        "where the first attempt's last checkpoint is"
    )
    assert of_rank_0[0] > 0
    refused = here.run(
        "submit", "-d", "--workers", "2", "--min-workers", "3", "--global-batch-size", "8", "--", "true"
    )
    assert refused.returncode != 0
    assert "workers.min: 3 is more than the most workers, 2" in refused.stderr
