"""A member that holds its turn for seconds ends its group in a live cell, and the other one has the GPU
alone."""

import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.bench.live.turns import NEED, propose_group, reported, up
from tests.e2e.conftest import new_place
from tests.support.installation.system import Gateway
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]  # a minute of real time

SCRIPT = """
import sys, time
from penstock.sdk.progress import progress
from penstock.sdk.stages import iteration, stage
for done in range(1, 1_000_000):
    iteration()
    with stage("gpu"):
        time.sleep(float(sys.argv[1]))
    progress(done)
"""


@pytest.fixture
def one_gpu() -> Iterator[Gateway]:
    place = new_place()
    child, gateway = up(place, "penstock")
    try:
        gateway.until_nodes(1)
        yield gateway
    finally:
        child.stop()
        shutil.rmtree(place, ignore_errors=True)


def submit(gateway: Gateway, name: str, held_s: float) -> str:
    command = [sys.executable, "-c", SCRIPT, str(held_s)]
    return gateway.submit(command, name=name, resources=NEED, checkpoint="signal")


def test_a_member_that_holds_its_turns_for_long_ends_its_group(one_gpu: Gateway) -> None:
    """`slow` computes for 4 s and `quick` for 20 ms, on one GPU. Turn by turn `quick` has a half per cent of
    its speed; each was promised a half."""
    slow = submit(one_gpu, "slow", 4.0)
    one_gpu.until(slow, "running")
    quick = submit(one_gpu, "quick", 0.02)
    one_gpu.until(quick, "queued")
    propose_group(one_gpu, [slow, quick])
    reported(one_gpu, quick)
    stopped = wait_until(
        lambda: [job for job in (slow, quick) if one_gpu.events(job, "job.preempted")],
        "the end of the group",
    )
    assert stopped == [slow]
    [preempted] = one_gpu.events(slow, "job.preempted")
    assert preempted["reason"].startswith(f"for a minute {quick} has had")
    assert preempted["reason"].endswith("promised were 50%")
    one_gpu.until(slow, "queued")
    assert one_gpu.job(quick)["attempt"] == 1
