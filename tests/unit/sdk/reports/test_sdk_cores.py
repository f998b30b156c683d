"""Pools of threads follow the cores of a task: called between iterations, seldom, and never outside of
Penstock."""

import os
import subprocess
import sys

import pytest

from penstock.sdk.cores import LOOK_EVERY_S, Watch
from penstock.sdk.reporter.lines import FIFO


class Machine:
    """A clock and an affinity, moved by hand."""

    def __init__(self) -> None:
        self.now_s, self.cores, self.looks = 100.0, 4, 0

    def clock(self) -> float:
        return self.now_s

    def count(self) -> int:
        self.looks += 1
        return self.cores


def test_a_pool_is_sized_at_once_and_again_after_each_change() -> None:
    """The task starts with 4 cores, and an operator takes two of them away in mid-training."""
    machine, sizes = Machine(), []
    watch = Watch(machine.clock, machine.count)
    watch.add(sizes.append)
    assert sizes == [4]
    for _ in range(1_000):
        watch.look()
    assert machine.looks == 1, "an iteration that follows at once costs no system call"
    machine.cores = 2
    machine.now_s += LOOK_EVERY_S
    watch.look()
    machine.now_s += LOOK_EVERY_S
    watch.look()
    assert sizes == [4, 2], "not again while nothing changes"


def test_a_second_pool_has_the_size_of_now() -> None:
    """A library and the script's own loader, each with its callback."""
    machine, found = Machine(), []
    watch = Watch(machine.clock, machine.count)
    watch.add(lambda number: found.append(("first", number)))
    watch.add(lambda number: found.append(("second", number)))
    machine.cores, machine.now_s = 3, machine.now_s + LOOK_EVERY_S
    watch.look()
    assert found == [("first", 4), ("second", 4), ("first", 3), ("second", 3)]


PROGRAM = """
import os, sys, time
from penstock.sdk.cores import cores, on_cores
from penstock.sdk.progress import progress
found = []
on_cores(found.append)
before = cores()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
time.sleep(1.1)
progress(1, 2)
print(found, before, [name for name in ("torch", "numpy", "msgspec") if name in sys.modules])
"""


def run(**env: str) -> str:
    found = {name: value for name, value in os.environ.items() if name != FIFO}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=found | env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to lose one")
def test_a_real_affinity_is_followed_without_any_framework() -> None:
    """As the node-reporter does it: from outside, while the script computes."""
    number = len(os.sched_getaffinity(0))
    assert run(**{FIFO: os.devnull}) == f"[{number}, 1] {number} []"


def test_outside_of_penstock_nothing_is_called() -> None:
    """The same script on a laptop: its user has chosen the number of threads."""
    assert run() == f"[] {len(os.sched_getaffinity(0))} []"
