"""Hunt for mutants: the random judges of the laboratory first, then the tests that belong to the changed
module.

Each mutant is put into a process of its own, forked from this one, which is as large as the product.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest

from tests.faults.laboratory.parallel import apart
from tests.faults.mutate import OPTIONS
from tests.faults.promises import (  # noqa: F401 - they enter theirs
    speaking_mutants,
    state_mutants,
    task_mutants,
    temporary_mutants,
    version_mutants,
    waiting_mutants,
    writer_mutants,
)
from tests.faults.promises.judges import asked
from tests.faults.promises.mutant import MUTANTS

FURTHER_SEEDS = 12
"""Tried where a mutant does not show in its known seed any more."""
TESTS_FAILED = 1
"""pytest's exit status."""


class Hunt(NamedTuple):
    """What became of a mutant. `judge` with `seed`, or `test`; both empty: it survived."""

    name: str
    judge: str = ""
    seed: int = 0
    what: str = ""
    test: str = ""
    cpu_s: float = 0.0

    @property
    def noticed(self) -> bool:
        return bool(self.judge or self.test)


class _FirstFailure:
    """Plugin of pytest."""

    def __init__(self) -> None:
        self.test = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.test:
            self.test = report.nodeid


def by_laboratory(name: str, further: int = FURTHER_SEEDS) -> Hunt:
    """In this process, which is spoilt afterwards: the mutant's judge at its known seed, then at further
    ones."""
    mutant, began_s = MUTANTS[name], time.process_time()
    mutant.put_in()
    for seed in (mutant.seed, *range(further)) if mutant.judge else ():
        what = asked(mutant.judge, seed, mutant.options)
        if what:
            return Hunt(name, mutant.judge, seed, what, cpu_s=time.process_time() - began_s)
    return Hunt(name, cpu_s=time.process_time() - began_s)


def by_tests(name: str) -> Hunt:
    """In this process: the tests of the changed module, until one fails. Raises `LookupError` where they do
    not run."""
    mutant, began_s, first = MUTANTS[name], time.process_time(), _FirstFailure()
    mutant.put_in()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = int(pytest.main([*OPTIONS, *mutant.tests], plugins=[first]))
    if status not in (0, TESTS_FAILED):
        raise LookupError(f"{name}: its tests do not run: {mutant.tests}, status {status}")
    return Hunt(name, test=first.test, cpu_s=time.process_time() - began_s)


def hunt_all(names: Iterable[str], *, tests: bool) -> Iterator[Hunt]:
    """`tests`: of those that no judge notices the tests are run, too."""
    for name in names:
        found: Hunt = apart(by_laboratory, name)
        if tests and not found.noticed:
            further: Hunt = apart(by_tests, name)
            found = further._replace(cpu_s=found.cpu_s + further.cpu_s)
        yield found


def misfits() -> list[str]:
    """Mutants whose line is not in the product any more."""
    found = []
    for name, mutant in MUTANTS.items():
        try:
            mutant.check()
        except LookupError as error:
            found.append(f"{name}: {error}")
    return found
