"""Pre-scheduling in `penstock up`, with real processes: the next job launches while the one before saves,
trains after it, and waits for none that goes on."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest

from penstock.model.nouns.settings import MAX_PRELAUNCH_WAIT_MS
from tests.bench.live.prelaunch import learn, less_idle, measure
from tests.e2e.conftest import new_place
from tests.support.installation.system import Gateway, installation
from tests.support.trainings.phased_job import phased, times
from tests.support.waiting import wait_until

pytestmark = pytest.mark.postgres

LESS_IDLE = 0.3
"""Source: Liquid §6.1; its four runs have 0.18, 0.50, 0.77 and 0.30."""
RUNS, PAIRS = 3, 3
NEED = {"gpus": 1, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 1}
SAVES_LONG = """
import os, sys, time
from penstock.sdk.phases import phase
phase("train")
phase("save")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
TRAINS_ON = """
import os, sys, time
from penstock.sdk.phases import phase
phase("train")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
phase("save")
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
phase("train")
while not os.path.exists(sys.argv[3]):
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    found = new_place()
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture(scope="module")
def gateway(place: Path) -> Iterator[Gateway]:
    size = ("--nodes", "1", "--virtual-gpus", "1")
    with installation(place / "up", *size, PENSTOCK_PRELAUNCH_WAIT_MS=str(MAX_PRELAUNCH_WAIT_MS)) as found:
        found.until_nodes(1)
        yield found


def test_a_launch_overlaps_the_save_and_the_training_does_not(gateway: Gateway, place: Path) -> None:
    """The first job saves until the second one's process has begun; that one trains when the first one's last
    process is gone."""
    began, kinds = place / "began", {"resources": NEED, "prelaunch": True}
    ids = [
        gateway.submit([sys.executable, "-c", SAVES_LONG, str(began)], name="first", **kinds),
        gateway.submit(
            ["sh", "-c", f'touch {began}; exec "$@"', "sh", *phased(0.1, 0.2, 0.0)], name="second", **kinds
        ),
    ]
    for job_id in ids:
        assert gateway.until_ended(job_id)["outcome"] == "succeeded"
    first, second = (times(gateway, job_id) for job_id in ids)
    assert first.save_ms <= second.started_ms < first.exited_ms
    assert second.opened_ms == first.exited_ms <= second.train_ms
    [placed] = gateway.events(ids[1], "placement.decided")
    assert (placed["after"], placed["prelaunch"]) == ([ids[0]], True)


def test_who_waits_for_one_that_goes_on_is_given_back(gateway: Gateway, place: Path) -> None:
    """The first job had only saved a checkpoint: the second one, which has launched by then, gives its place
    up, and runs when the first has ended."""
    marks = [place / name for name in ("save", "train", "end")]
    command = [sys.executable, "-c", TRAINS_ON, *map(str, marks)]
    first = gateway.submit(command, name="first", resources=NEED)
    gateway.until(first, "running")
    second = gateway.submit(phased(0.1, 0.2, 0.0), name="second", resources=NEED, prelaunch=True)
    marks[0].touch()
    gateway.until(second, "launching")
    assert "launches" in gateway.get(f"/v1/jobs/{second}/why")["text"]
    marks[1].touch()
    gateway.until(second, "queued")
    wait_until(lambda: gateway.events(second, "stop.decided"), "the stop in the tables")
    [stopped] = gateway.events(second, "stop.decided")
    assert stopped["reason"] == "predecessor_late"
    assert gateway.job(first)["status"] == "running"
    marks[2].touch()
    assert gateway.until_ended(first)["outcome"] == "succeeded"
    assert gateway.until_ended(second)["outcome"] == "succeeded"
    assert times(gateway, second).opened_ms is None


@pytest.mark.slow
def test_a_gpu_is_idle_for_at_least_thirty_percent_less(gateway: Gateway) -> None:
    """Pairs of equal trainings of 5 s, of which the launch takes 1.5 s and the save half a second: in turn as
    they are, and with a launch of the second one before the first has ended. *Idle*: from the last iteration
    of one to the first of the other. What is promised is the mean of three pairs, in the median of three
    runs."""
    learn(gateway)
    runs = [measure(gateway, PAIRS) for _ in range(RUNS)]
    saved = [less_idle(found) for found in runs]
    print(f"idle time less by {', '.join(f'{share:.0%}' for share in saved)}")
    assert median(saved) >= LESS_IDLE, (saved, runs)
    assert median(gap.overlap_ms for found in runs for gap in found[True]) > 0, "the launch is what is saved"
    assert max(gap.overlap_ms for found in runs for gap in found[False]) <= 0, "one GPU, one job"
