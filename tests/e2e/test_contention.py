"""The contention-guard on a live cell: a training gets the cores that it needs, and what slows it is slowed until it has ended.

`-s` shows the figures. The node counts more cores than this machine has, so jobs that have cores of their own still meet on real ones.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.e2e.conftest import Installation, eventually, installed, listed
from tests.e2e.test_cores import before_others
from tests.support.command_process import ROOT

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

TRAINS = """
import multiprocessing, sys, time
from penstock.sdk.progress import progress

def work(_):
    return sum(range(int(sys.argv[4])))

if __name__ == "__main__":
    threads = int(sys.argv[3])
    with multiprocessing.get_context("fork").Pool(threads) as pool:
        for done in range(1, 1_000_000_000):
            began_s = time.monotonic()
            pool.map(work, range(threads), chunksize=1)
            ended_s = time.monotonic()
            with open(sys.argv[1], "a") as file:
                file.write(f"{ended_s} {ended_s - began_s}\\n")
            progress(done)
            if __import__("os").path.exists(sys.argv[2]):
                break
"""
HOGS = """
import multiprocessing, os

def hog(_):
    while True:
        pass

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(8, os.setsid) as pool:
        pool.map(hog, range(8), chunksize=1)
"""
WITHIN = 1.10
BACK_S = 10.0
QUIET = os.getloadavg()[0] < 0.5 * len(os.sched_getaffinity(0))
"""Whether step times can be compared: else what other programs do on the cores that hogs give up is in them."""
SPAN_S, STAYS_S = 2.0, 3.0


class Training:
    """One job with a GPU; it ends when its file of that name exists."""

    def __init__(self, up: Installation, name: str, threads: int, work: int, *flags: str) -> None:
        self.up, self.name = up, name
        self.file, self.end = up.home / f"{name}.steps", up.home / f"{name}.end"
        program = up.home / f"{name}.py"
        program.write_text(TRAINS)
        program.chmod(0o644)
        library = ("--env", f"PYTHONPATH={ROOT / 'libs'}")
        command = ("--", sys.executable, str(program), str(self.file), str(self.end), str(threads), str(work))
        answer = up.run("submit", "-d", "--name", name, "--gpus", "1", *library, *flags, *command)
        assert answer.returncode == 0, answer.stderr
        eventually(lambda: len(self.steps()) > 10, f"it does not train: {up.run('logs', name).stdout}")

    def steps(self) -> list[tuple[float, float]]:
        """(ended at, seconds) of each step so far."""
        if not self.file.exists():
            return []
        lines = self.file.read_text().splitlines()[:-1]
        return [(float(at_s), float(took_s)) for at_s, took_s in map(str.split, lines)]

    def recent_s(self, since_s: float) -> float | None:
        """The mean of the steps of the last seconds that began after this moment; None: there are none."""
        steps = [(at_s, took_s) for at_s, took_s in self.steps() if at_s - took_s > since_s]
        return mean_until(steps, steps[-1][0]) if steps else None

    def pid(self) -> int:
        [task] = listed(self.up, "describe", "job", self.name)["tasks"]  # type: ignore[misc]
        return int(task["pid"])


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return [pid, *(found for child in children for found in family(child))]


def fewest(up: Installation) -> int:
    """Cores that the hogs have now."""
    return len(decided(up, "hogs")[-1]["cores"])


def decided(up: Installation, name: str) -> list[dict[str, Any]]:
    """Its changes of cores."""
    shown = json.loads(up.run("events", name, "-o", "json").stdout)["events"]
    return [event["data"] for event in shown if event["type"] == "penstock.cores.decided"]


def cell(contention: dict[str, object], cores: int) -> Iterator[Installation]:
    env = {"PENSTOCK_CONTENTION": json.dumps(contention)}
    with installed("--virtual-gpus", "1", "--cores", str(cores), **env) as running:
        yield running


@pytest.fixture
def searching() -> Iterator[Installation]:
    yield from cell({"eliminate": False}, len(os.sched_getaffinity(0)))


@pytest.fixture
def eliminating() -> Iterator[Installation]:
    yield from cell({"search": "none"}, 4 * len(os.sched_getaffinity(0)))


def test_a_starved_training_gets_the_cores_that_it_needs(searching: Installation) -> None:
    """It does not state how many it needs, so it begins with one. Its loader could use more than the node has: within four probes it has them."""
    training = Training(searching, "starves", 8, 300_000)
    before_others(training.pid())
    began_s = time.monotonic()
    eventually(
        lambda: any(one["cause"] == "settled" for one in decided(searching, "starves")), "it never settles"
    )
    changes = decided(searching, "starves")
    probes = [one for one in changes if one["cause"] == "probe"]
    print(
        f"\nsettled after {len(probes)} probes in {time.monotonic() - began_s:.0f} s: {changes[-1]['reason']}"
    )
    assert len(changes[-1]["cores"]) == len(os.sched_getaffinity(0)), changes
    assert len(probes) <= 4
    why = " ".join(searching.run("why", "starves").stdout.split())
    assert "asked for by contention-guard: its cores are settled" in why, why
    training.end.touch()


def test_what_slows_a_training_is_slowed_until_it_has_ended(eliminating: Installation) -> None:
    """A preprocessing job keeps every core of the machine busy beside a training. It loses cores until the training is as fast as alone, and gets
    them back when the training has ended."""
    training = Training(eliminating, "trains", 1, 1_500_000, "--cores", "1")
    before_others(training.pid())
    alone_from_s = time.monotonic()
    time.sleep(15)
    alone_s = mean(took_s for at_s, took_s in training.steps() if at_s > alone_from_s)
    cores = 4 * len(os.sched_getaffinity(0)) - 1
    program = eliminating.home / "hogs.py"
    program.write_text(HOGS)
    program.chmod(0o644)
    flags = ("--name", "hogs", "--gpus", "0", "--cores", str(cores))
    answer = eliminating.run("submit", "-d", *flags, "--", sys.executable, str(program))
    assert answer.returncode == 0, answer.stderr
    eventually(lambda: bool(listed(eliminating, "describe", "job", "hogs")["tasks"]), "no hogs")
    [task] = listed(eliminating, "describe", "job", "hogs")["tasks"]  # type: ignore[misc]
    for pid in family(
        int(task["pid"])
    ):  # each a session of its own, to which the kernel gives an equal part of a core
        before_others(pid)
    hurt_s = time.monotonic()
    eventually(lambda: len(decided(eliminating, "hogs")) > 0, "no job is slowed")
    print(f"\nhogs are slowed after {time.monotonic() - hurt_s:.1f} s")
    slowed_s = time.monotonic()
    bound_s = WITHIN * alone_s
    eventually(
        lambda: (training.recent_s(slowed_s) or 9e9) <= bound_s or fewest(eliminating) == 1, "it stays slow"
    )
    if QUIET:
        time.sleep(2 * STAYS_S)
        worst_s = max(took_s for at_s, took_s in training.steps() if at_s > hurt_s)
        back_s = back_after_s(training.steps(), hurt_s, bound_s)
        print(f"alone {1_000 * alone_s:.1f} ms, worst {1_000 * worst_s:.1f} ms, back after {back_s:.1f} s")
        assert back_s <= BACK_S
    else:
        print("this machine has other work: how fast the training is again was not judged")
    training.end.touch()
    eventually(
        lambda: decided(eliminating, "hogs")[-1]["cause"] == "released", "they do not get their cores back"
    )
    assert len(decided(eliminating, "hogs")[-1]["cores"]) == cores
    assert {one["cause"] for one in decided(eliminating, "hogs")} == {"contention", "released"}
    assert "no training runs on" in " ".join(eliminating.run("why", "hogs").stdout.split())
    assert decided(eliminating, "trains") == []
    eliminating.run("cancel", "hogs")


def mean_until(steps: list[tuple[float, float]], until_s: float) -> float:
    """Of the steps that ended in the seconds before."""
    return mean(took_s for at_s, took_s in steps if until_s - SPAN_S < at_s <= until_s)


def back_after_s(steps: list[tuple[float, float]], since_s: float, bound_s: float) -> float:
    """From the moment at which it is slow until it is not, for `STAYS_S`, by means over `SPAN_S`. Raises where it was never slow, or is not fast again."""
    after = [(at_s, took_s) for at_s, took_s in steps if at_s - took_s > since_s]
    means = [(at_s, mean_until(after, at_s)) for at_s, _ in after if at_s > after[0][0] + SPAN_S]
    slow_s = next(at_s for at_s, found_s in means if found_s > bound_s)
    fast_s = None
    for at_s, found_s in means:
        if at_s <= slow_s or found_s > bound_s:
            fast_s = None
        elif fast_s is None:
            fast_s = at_s
        elif at_s >= fast_s + STAYS_S:
            return fast_s - slow_s
    raise AssertionError(f"it stays slow: {means}")
