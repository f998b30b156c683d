# clocks: sets the one deadline that all waiting has
"""The whole run (a pytest plugin): its deadline, its order, what each process runs, and its last lines."""

import gc
import inspect
import os
import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.story import NOT_RUN
from tests.support.waiting import begin_run, left_s

DEADLINE_S = 3_600.0
"""Four times what a run takes on two busy processors; CI ends one after 90 minutes."""
GRACE_S = 20.0
"""For what ends by itself at the deadline (`tests.support.waiting`), and its servers; then comes a signal."""
TESTS = Path(__file__).parents[1]
FOLDERS = ("faults", "e2e", "integration", "simulation", "papers", "unit", "replay")
"""Order of the run, longest tests first: when tests run in parallel, nothing long is left for the end."""
SLOWEST = 20
RARELY = (20_000, 50, 50)
"""Thresholds of the garbage collector, which else looks through all collected tests every few seconds.

Measured on 562 unit tests: 12 % of the processor time without, 5 % with them.
"""
SAYS = "TEST_RUN_SAYS"
"""Environment variable: a file with results of earlier parts of the CI run, for the last lines."""
PROVES = "proves"
"""User property of a report: the first line of its test's docstring."""
PART = re.compile(r"\[part-\d+-of-\d+")
"""In a test's id: one part of a long test, which needs no server of its module and runs in any process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("the whole run")
    group.addoption(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        help="seconds until all waiting ends, in all tests (%(default)g)",
    )
    group.addoption(
        "--deadline-grace",
        type=float,
        default=GRACE_S,
        help="seconds for what ends by itself at the deadline (%(default)g)",
    )
    group.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run modules, and the tests in them, in an order of chance",
    )


def pytest_configure(config: pytest.Config) -> None:
    begin_run(config.getoption("--deadline"))
    gc.set_threshold(*RARELY)


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("--shuffle")
    return [f"the run ends in {left_s():.0f} s at the latest"] + (
        [] if seed is None else [f"order: --shuffle {seed}"]
    )


@pytest.hookimpl(optionalhook=True)  # runs without xdist have no such hook
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Six for two cores: a worker waits more than half of its time, for servers and processes."""
    return (os.cpu_count() or 1) + 4


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # it ships no types
    """The tests of one module stay together, for they share its servers; parts of long tests do not."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if PART.search(nodeid) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes have their argument's name and a number in ids: a packed file has the second of its making in it,
    and all test processes must collect the same ids."""
    return argname if isinstance(val, bytes) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts by folder, and keeps the order within. With `--shuffle` by chance, alike in all processes."""
    seed = config.getoption("--shuffle")
    if seed is None:
        places = {TESTS / name: place for place, name in enumerate(FOLDERS)}
        items.sort(
            key=lambda item: min(
                (places[each] for each in item.path.parents if each in places), default=len(places)
            )
        )
        return
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    chance = np.random.default_rng(seed)
    mixed: list[Sequence[pytest.Item]] = list(modules.values())
    items[:] = [
        mixed[m][i] for m in chance.permutation(len(mixed)) for i in chance.permutation(len(mixed[m]))
    ]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # what was collected stays until the end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Interrupts what does not end by itself at the run's deadline: no test has a limit of its own."""
    item.add_marker(
        pytest.mark.timeout(max(left_s(), 0.0) + item.config.getoption("--deadline-grace")), append=False
    )
    item.user_properties.append(
        (PROVES, (inspect.getdoc(getattr(item, "obj", None)) or "").partition("\n")[0])
    )
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if left_s() <= 0:
        pytest.fail(NOT_RUN, pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The slowest tests, what each proves, and what did not run here, right above the closing line."""
    took_s: dict[str, float] = {}
    proves: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for report in (each for kind in terminalreporter.stats.values() for each in kind):
        if isinstance(report, pytest.TestReport):
            took_s[report.nodeid] = took_s.get(report.nodeid, 0.0) + report.duration
            proves[report.nodeid] = str(dict(report.user_properties).get(PROVES, ""))
            if report.skipped and isinstance(report.longrepr, tuple):
                skipped[report.nodeid] = str(report.longrepr[2]).removeprefix("Skipped: ")
    if len(took_s) > 10 * SLOWEST:  # who runs a few tests looks at those
        terminalreporter.section(f"the slowest {SLOWEST}, and what each proves")
        for nodeid, seconds in sorted(took_s.items(), key=lambda each: -each[1])[:SLOWEST]:
            terminalreporter.write_line(f"{seconds:6.1f} s  {nodeid}: {proves[nodeid]}")
    if skipped:
        terminalreporter.section("not run here, and what runs it")
        for nodeid, why in skipped.items():
            terminalreporter.write_line(f"{nodeid}: {why}")
    if SAYS in os.environ:
        terminalreporter.write_line(Path(os.environ[SAYS]).read_text().strip())
