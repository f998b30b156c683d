"""The contention-guard on a live cell: a training gets the cores that it needs, and what slows it is slowed
until it has ended.

`-s` shows the figures. The node counts more cores than this machine has, so jobs that have cores of their own
still meet on real ones.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from penstock.scheduling.acting.core_search import keeps
from tests.e2e.conftest import Installation, installed, listed
from tests.e2e.scheduling.test_cores import before_others
from tests.support.cli.command_process import ROOT
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.postgres,
    pytest.mark.slow,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores"),
]

TRAINS = """
import multiprocessing, os, sys, time
from penstock.sdk.progress import progress

{work}

if __name__ == "__main__":
    threads = int(sys.argv[3])
    with multiprocessing.get_context("fork").Pool(threads) as pool:
        for done in range(1, 1_000_000_000):
            began_s = time.monotonic()
            pool.map(work, range(threads), chunksize=1)
            ended_s = time.monotonic()
            with open(sys.argv[1], "a") as file:
                file.write(f"{{ended_s}} {{ended_s - began_s}}\\n")
            progress(done)
            if os.path.exists(sys.argv[2]):
                break
"""
COMPUTES = """
def work(_):
    return sum(range(int(sys.argv[4])))
"""
WAITS_FOR_ITS_GPU = """
def work(_):
    sum(range(int(sys.argv[4])))
    time.sleep(0.05)
"""
COPIES = """
import numpy
batch = numpy.ones(int(sys.argv[4]) << 17)
copied = numpy.ones_like(batch)

def work(_):
    numpy.copyto(copied, batch)
"""
"""Of arrays of so many MiB."""
HOGS = """
import multiprocessing, os, sys, time
{imports}

def hog(number):
    {prepares}
    open(f"{{sys.argv[1]}}.{{number}}", "w").close()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    while True:
        {repeats}

if __name__ == "__main__":
    hogs = int(sys.argv[2])
    with multiprocessing.get_context("fork").Pool(hogs, os.setsid) as pool:
        pool.map(hog, range(hogs), chunksize=1)
"""
"""Each in a session of its own, to which the kernel gives an equal part of a core. They are ready before they
begin, at one moment."""
SPINS = HOGS.format(imports="", prepares="pass", repeats="pass")
STREAMS = HOGS.format(
    imports="import numpy\nsource = numpy.ones(int(sys.argv[3]) << 17)",
    prepares="target = numpy.ones_like(source)",
    repeats="numpy.copyto(target, source)",
)
CORES = min(16, len(os.sched_getaffinity(0)))
"""Of this machine, as many as four probes reach by doubling."""
WITHIN = 1.10
STEADY = 1.05
"""A training whose step time varies more while it is alone has no known speed, for the guard neither
(`Settling`)."""
BACK_S = 10.0
SPAN_S, STAYS_S = 2.0, 3.0
ALONE_S = 15.0
ROUNDS, ROUND_S = 3, 3.0


def last_level_cache_mib() -> int:
    """Of this machine."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(size.read_text().strip().removesuffix("K")) // 1_024 for size in sizes), default=64)


class Training:
    """One job with a GPU; it ends when its file of that name exists."""

    def __init__(
        self, up: Installation, name: str, threads: int, size: int, *flags: str, work: str = COMPUTES
    ) -> None:
        self.up, self.name = up, name
        self.file, self.end = up.home / f"{name}.steps", up.home / f"{name}.end"
        program = up.home / f"{name}.py"
        program.write_text(TRAINS.format(work=work))
        program.chmod(0o644)
        library = ("--env", f"PYTHONPATH={ROOT / 'libs'}")
        command = ("--", sys.executable, str(program), str(self.file), str(self.end), str(threads), str(size))
        answer = up.run("submit", "-d", "--name", name, "--gpus", "1", *library, *flags, *command)
        assert answer.returncode == 0, answer.stderr
        wait_until(lambda: len(self.steps()) > 10, lambda: f"ten steps: {up.run('logs', name).stdout}")

    def steps(self) -> list[tuple[float, float]]:
        """(ended at, seconds) of each step so far."""
        if not self.file.exists():
            return []
        lines = self.file.read_text().splitlines()[:-1]
        return [(float(at_s), float(took_s)) for at_s, took_s in map(str.split, lines)]

    def pid(self) -> int:
        return self.up.pid(self.name)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = [
        int(child)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        for child in (thread / "children").read_text().split()
    ]
    return [pid, *(found for child in children for found in family(child))]


def decided(up: Installation, name: str) -> list[dict[str, Any]]:
    """Its changes of cores."""
    shown = json.loads(up.run("events", name, "-o", "json").stdout)["events"]
    return [event["data"] for event in shown if event["type"] == "penstock.cores.decided"]


def cell(place: Path, contention: dict[str, object], cores: int) -> Iterator[Installation]:
    """Its services come before what else runs on this machine, as its jobs do, each with an equal part of a
    core: as on a machine of their own."""
    env = {"PENSTOCK_CONTENTION": json.dumps(contention)}
    with installed(place, "--virtual-gpus", "1", "--cores", str(cores), **env) as running:
        for pid in family(running.process.pid):
            if os.getsid(pid) != os.getsid(0):
                before_others(pid)
        yield running


@pytest.fixture
def searching(place: Path) -> Iterator[Installation]:
    yield from cell(place, {"eliminate": False, "users_cores": "override"}, CORES)


@pytest.fixture
def eliminating(place: Path) -> Iterator[Installation]:
    yield from cell(place, {"search": "none"}, 4 * CORES)


@pytest.mark.parametrize(
    ("threads", "size", "work", "flags", "fewest"),
    [(2 * CORES, 600_000, COMPUTES, (), CORES), (1, 300_000, WAITS_FOR_ITS_GPU, ("--cores", str(CORES)), 1)],
    ids=["uses_all", "uses_one"],
)
def test_a_training_gets_the_cores_that_it_needs_and_no_more(
    searching: Installation, threads: int, size: int, work: str, flags: tuple[str, ...], fewest: int
) -> None:
    """One training states no cores, so it begins with one; its loader could use more than the node has. The
    other begins with all; it uses one for a few milliseconds of each step, for the rest of which it waits for
    its GPU. Within four probes each has the fewest cores that make it as fast, within 5 %, as any number: the
    operator then gives it each number in turn."""
    training = Training(searching, "trains", threads, size, *flags, work=work)
    before_others(training.pid())
    began_s = time.monotonic()  # clock: for the figure that is printed
    wait_until(
        lambda: any(one["cause"] == "settled" for one in decided(searching, "trains")), "settled cores"
    )
    changes = decided(searching, "trains")
    probes = [one for one in changes if one["cause"] == "probe"]
    found = len(changes[-1]["cores"])
    took_s = time.monotonic() - began_s  # clock: for the figure that is printed
    print(f"\nsettled after {len(probes)} probes in {took_s:.0f} s: {changes[-1]['reason']}")
    assert 1 <= len(probes) <= 4
    why = " ".join(searching.run("why", "trains").stdout.split())
    assert "asked for by contention-guard: its cores are settled" in why, why
    speeds = speeds_by_cores(training)
    print(", ".join(f"{cores} cores: {speed:.2f} steps/s" for cores, speed in speeds.items()))
    assert keeps(speeds[found], max(speeds.values())), (found, speeds)
    assert found == fewest, (found, speeds)
    training.end.touch()


def speeds_by_cores(training: Training) -> dict[int, float]:
    """Steps per second with each number of cores of this machine: of the median step, in turns, so that other
    work of the machine meets each number."""
    took_s: dict[int, list[float]] = {cores: [] for cores in range(1, CORES + 1)}
    for _ in range(ROUNDS):
        for cores, found_s in took_s.items():
            [row] = listed(training.up, "cores", training.name, str(cores), "--reason", "measures")["tasks"]
            assert (row["applied"], len(row["cores"]), row["problem"]) == (True, cores, "")
            since_s = time.monotonic()  # clock: tells which of the training's steps count
            wait_until(lambda since_s=since_s: training.steps()[-1][0] > since_s + ROUND_S, "steps")
            found_s += [step_s for at_s, step_s in training.steps() if at_s - step_s > since_s]
    return {cores: 1 / median(found_s) for cores, found_s in took_s.items()}


@pytest.mark.parametrize(
    ("hog", "hogs", "work", "size"),
    [(SPINS, 4 * CORES, COMPUTES, 1_500_000), (STREAMS, 2 * CORES, COPIES, 64)],
    ids=["cores", "memory"],
)
def test_what_slows_a_training_is_slowed_until_it_has_ended(
    eliminating: Installation, hog: str, hogs: int, work: str, size: int
) -> None:
    """A preprocessing job keeps every core of the machine busy beside a training: it computes, or it copies
    arrays larger than the last-level cache beside a training that copies its batches. It loses cores until
    the training is as fast as alone, and gets them back when the training has ended.

    The time, ten seconds at most, counts from the moment at which all of the job's processes begin. The
    training is as fast as alone when the mean of its steps over 2 s is at most a tenth above the slowest such
    mean alone, for 3 s; alone was just before, on the same cores. Where other work of this machine makes its
    speed alone unsteady, or one program on another core, which a job without GPUs keeps, already slows it, it
    may take two minutes."""
    training = Training(eliminating, "trains", 1, size, "--cores", "1", work=work)
    before_others(training.pid())
    alone_from_s = time.monotonic()  # clock: alone on the machine, for the comparison
    time.sleep(ALONE_S)  # clock: alone on the machine, as long as it measures
    means = means_after(training.steps(), alone_from_s + SPAN_S)
    alone_s = mean(found_s for _, found_s in means)
    bound_s = WITHIN * max(found_s for _, found_s in means)
    one_beside_s = beside_one_program_s(training)
    cores = 4 * CORES - 1
    began_s = begin_hogs(eliminating, hog, hogs, cores)
    wait_until(lambda: decided(eliminating, "hogs"), "a job that is slowed")
    took_s = time.monotonic() - began_s  # clock: for the figure that is printed
    print(f"\nhogs are known to be slowed after {took_s:.1f} s")

    def back() -> float | None:
        time.sleep(1)  # clock: alone on the machine; looks at all steps would slow them
        return back_after_s(training.steps(), began_s, bound_s)

    back_s = wait_until(
        back,
        lambda: (
            f"the speed of before: never slow, or slow for too long; {1_000 * bound_s / WITHIN:.1f} ms at "
            f"most alone, then {each_second_ms(training, began_s)};"
            f" cores of the job: {[len(one['cores']) for one in decided(eliminating, 'hogs')]}"
        ),
    )
    assert back_s is not None
    worst_s = max(found_s for _, found_s in means_after(training.steps(), began_s))
    steady = max(bound_s / WITHIN, one_beside_s) <= STEADY * alone_s
    print(
        f"alone {1_000 * alone_s:.1f} ms, at most {1_000 * bound_s / WITHIN:.1f}; with one program on "
        f"another core at most {1_000 * one_beside_s:.1f};"
        f" beside them {1_000 * worst_s:.1f}"
    )
    print(f"back after {back_s:.1f} s; steady alone: {'yes' if steady else 'no, so two minutes would do'}")
    assert back_s <= BACK_S or not steady
    training.end.touch()
    wait_until(lambda: decided(eliminating, "hogs")[-1]["cause"] == "released", "their cores, given back")
    assert len(decided(eliminating, "hogs")[-1]["cores"]) == cores
    assert {one["cause"] for one in decided(eliminating, "hogs")} == {"contention", "released"}
    assert "no training runs on" in " ".join(eliminating.run("why", "hogs").stdout.split())
    assert decided(eliminating, "trains") == []
    eliminating.run("cancel", "hogs")


def beside_one_program_s(training: Training) -> float:
    """The slowest mean step with one program on another core: cores of one machine may be threads of one core
    of another."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) as program:
        began_s = time.monotonic()  # clock: alone on the machine, but for this program
        time.sleep(ALONE_S)  # clock: as long as it measures
        means = means_after(training.steps(), began_s + SPAN_S)
        program.kill()
    time.sleep(SPAN_S)  # clock: as long as means look back, so that later ones are without the program
    return max(found_s for _, found_s in means)


def begin_hogs(up: Installation, hog: str, hogs: int, cores: int) -> float:
    """A job of so many processes on so many cores; when they begin."""
    program, begin = up.home / "hogs.py", up.home / "hogs.begin"
    program.write_text(hog)
    program.chmod(0o644)
    flags = ("--name", "hogs", "--gpus", "0", "--cores", str(cores))
    mib = 16 + last_level_cache_mib()
    answer = up.run(
        "submit", "-d", *flags, "--", sys.executable, str(program), str(begin), str(hogs), str(mib)
    )
    assert answer.returncode == 0, answer.stderr
    ready = [up.home / f"hogs.begin.{number}" for number in range(hogs)]
    wait_until(lambda: all(path.exists() for path in ready), "all hogs")
    for pid in family(up.pid("hogs")):
        before_others(pid)
    began_s = time.monotonic()  # clock: alone on the machine; the promised ten seconds count from here
    begin.touch()
    return began_s


def each_second_ms(training: Training, since_s: float) -> list[int]:
    """Its mean step of the two seconds before, once a second."""
    by_second = {int(at_s - since_s): found_s for at_s, found_s in means_after(training.steps(), since_s)}
    return [round(1_000 * found_s) for found_s in by_second.values()]


def means_after(steps: list[tuple[float, float]], since_s: float) -> list[tuple[float, float]]:
    """(ended at, mean seconds of the steps of the two seconds before) of each step that ended after this
    moment."""
    found, first = [], 0
    for last, (at_s, _) in enumerate(steps):
        while steps[first][0] <= at_s - SPAN_S:
            first += 1
        if at_s > since_s:
            found.append((at_s, mean(took_s for _, took_s in steps[first : last + 1])))
    return found


def back_after_s(steps: list[tuple[float, float]], since_s: float, bound_s: float) -> float | None:
    """Seconds from this moment until, having been slow, it is not for `STAYS_S`; None: not yet."""
    slow, fast_s = False, None
    for at_s, found_s in means_after(steps, since_s):
        if found_s > bound_s:
            slow, fast_s = True, None
        elif slow and fast_s is None:
            fast_s = at_s
        elif fast_s is not None and at_s >= fast_s + STAYS_S:
            return fast_s - since_s
    return None
