"""What the test run itself promises: its deadline, its order, and the story of a failure."""

import asyncio
import os
import subprocess
import sys
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest

from infra.lints.clocks import found
from tests.support.cli.command_process import ROOT
from tests.support.story import waiting_tasks
from tests.support.waiting import RUN_ENDS
from tests.support.whole_run import PART, TESTS, pytest_collection_modifyitems

GIVEN = """
import os
import pytest
from tests.support.story import told
from tests.support.story import waiting_tasks
from tests.support.waiting import RUN_ENDS, wait_until

@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("logs") / "service.log"
    with told("the service's log", path), told("the last events", lambda: 1 / 0):
        yield path

def test_first(log):
    log.write_text("a line of the first test")

def test_second(log):
    with log.open("a") as file:
        file.write("a line of the second test")
    assert False

def test_fails_beside_a_cell():
    cell = ["an event"]
    with told("the cell", lambda: cell.pop()):
        assert False

def test_lacks_a_part():
    pytest.skip("no such part: `make part` installs it")

def test_waits():
    os.environ[RUN_ENDS] = "0"
    wait_until(lambda: False, lambda: "Godot" + "!")

def test_comes_too_late():
    pass
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints about the given tests, in a run of its own."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "test_given.py").write_text(GIVEN)
    plugins = (
        "-p",
        "tests.support.whole_run",
        "-p",
        "tests.support.story",
        "-p",
        "pytest_timeout",
        "-p",
        "no:cacheprovider",
    )
    env = {
        name: value
        for name, value in os.environ.items()
        if name != RUN_ENDS and not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-c", os.devnull, "--rootdir", folder, folder],
        cwd=ROOT,
        env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def report(printed: str, test: str) -> str:
    """The part of the output about one failed test."""
    return printed.partition(f"_ {test} _")[2].partition("\n____")[0]


def test_a_wait_ends_with_the_run_and_says_what_it_waited_for(printed: str) -> None:
    """A service never becomes ready: hours later somebody reads which event was missing."""
    assert "the whole run ends: waited 0 s for Godot!" in report(printed, "test_waits")


def test_after_the_deadline_nothing_more_begins(printed: str) -> None:
    """Else each of the tests behind would wait for the same service, one after the other."""
    assert "not run: the whole run's deadline had passed" in report(
        printed, "ERROR at setup of test_comes_too_late"
    )


def test_a_failure_shows_the_lines_of_its_own_test_alone(printed: str) -> None:
    """A module's installation logs for all its tests; whoever reads a failure wants the lines of that one."""
    story = report(printed, "test_second")
    assert "a line of the second test" in story.partition("told by the service's log")[2]
    assert "a line of the first test" not in story
    assert "(ZeroDivisionError: division by zero)" in story, "a source that fails hides nothing"
    assert "processors, load" in story


def test_what_lives_no_longer_than_the_failure_tells_its_story(printed: str) -> None:
    """A cell that a test opens in its body is gone when the failure is reported."""
    assert "an event" in report(printed, "test_fails_beside_a_cell").partition("told by the cell")[2]


def test_what_is_not_run_is_named_with_its_command(printed: str) -> None:
    """Nobody reads a number of skipped tests; the last lines say what they are and what runs them."""
    assert (
        "test_given.py::test_lacks_a_part: no such part: `make part` installs it"
        in printed.partition("not run here")[2]
    )


async def test_tasks_that_nobody_wakes_are_shown() -> None:
    """The interrupted event loop itself says nothing about its tasks."""

    async def never_set() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(never_set(), name="the reader")
    await asyncio.sleep(0)
    assert any(
        line.startswith("the reader: ")
        and "never_set" in line
        and line.rpartition(" → ")[2].startswith("Event.wait")
        for line in waiting_tasks().splitlines()
    )
    task.cancel()


def order(seed: int | None) -> list[tuple[str, int]]:
    """Of three modules with ten tests each: (folder, number)."""
    config: Any = SimpleNamespace(getoption=lambda name: seed)
    paths = [TESTS / folder / "test_x.py" for folder in ("unit", "e2e", "faults")]
    items: Any = [SimpleNamespace(path=path, number=n) for path in paths for n in range(10)]
    pytest_collection_modifyitems(config, items)
    return [(item.path.parent.name, item.number) for item in items]


def test_a_seed_gives_one_order() -> None:
    """All test processes must agree on the order, and a failure in it must be repeatable."""
    assert order(7) == order(7) != order(8)
    assert sorted(order(7)) == sorted(order(None))
    assert [folder for folder, _ in groupby(folder for folder, _ in order(7))] == list(dict(order(7))), (
        "modules stay whole"
    )


def test_the_longest_folders_come_first() -> None:
    """Nothing long is left for the end, when the other processes are idle."""
    assert order(None) == [(folder, n) for folder in ("faults", "e2e", "unit") for n in range(10)]


def test_parts_of_long_tests_are_known_by_their_ids() -> None:
    """Everything else stays with its module, whose servers it shares."""
    assert PART.search("tests/faults/laboratory/test_laboratory.py::test_sound[part-3-of-12]")
    assert not PART.search("tests/unit/test_x.py::test_y[partial]")


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(1)",
        "await asyncio.sleep(0.1)",
        "await asyncio.wait_for(x, 3)",
        "async with asyncio.timeout(3): pass",
        "began = time.monotonic()",
        "thread.join(5)",
        "process.wait(60)",
        "subprocess.run(['true'], timeout=5)",
        "queue.get(timeout_s=LONG_S)",
        "mark = pytest.mark.timeout(4)",
        "while asyncio.get_running_loop().time() < end: pass",
        "time.sleep(1)  # clock: short",
    ],
)
def test_clocks_in_tests_are_refused(line: str) -> None:
    """Each has made a test fail on a machine that was busy, and on no other."""
    assert [where for where, _ in found(f"async def test():\n    {line}\n")] == [2]


@pytest.mark.parametrize(
    "line",
    [
        "await asyncio.sleep(0)",
        "time.sleep(1)  # clock: nothing may come meanwhile; a slow machine only misses it",
        "process.wait()",
        "process.wait(timeout=None)",
        "submit(queue_timeout_ms=5)",
        "', '.join(names)",
    ],
)
def test_what_waits_for_events_or_says_why_is_accepted(line: str) -> None:
    assert list(found(f"async def test():\n    {line}\n")) == []


def test_a_file_in_virtual_time_says_so_once() -> None:
    """There a sleep costs nothing and no verdict depends on the machine."""
    assert list(found("# clocks: all of it runs in virtual time\nimport time\ntime.sleep(3)\n")) == []
