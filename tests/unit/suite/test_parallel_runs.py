"""Stories of tables whose simulations run on all cores."""

import os
from collections.abc import Iterator

import pytest

from tests.papers import parallel_runs
from tests.papers.parallel_runs import begin, simulated, spent, unfinished, workers

PLACEHOLDER = 1.0


@simulated(PLACEHOLDER)
def process_of(number: int, *, fails: bool = False) -> float:
    """Id of the process that works it out."""
    if fails:
        raise ValueError(f"{number} cannot be simulated")
    return float(os.getpid())


def tables() -> Iterator[float]:
    """Two tables that take the same simulation, and one of their own each."""
    yield process_of(1) / process_of(2)
    yield process_of(3) / process_of(2)


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_runs, "_found", {})


def test_a_simulation_that_two_tables_take_runs_once_and_elsewhere() -> None:
    with workers() as pool:
        assert begin(tables, pool) == (2, 3)
        assert begin(tables, pool) == (2, 0)
        assert process_of(2) not in (PLACEHOLDER, os.getpid())


def test_one_that_was_not_foreseen_runs_when_it_is_needed() -> None:
    assert process_of(4) == process_of(4) == os.getpid()


def test_one_that_fails_says_why_where_its_result_is_needed() -> None:
    with workers() as pool:
        assert begin(lambda: [process_of(5, fails=True)], pool) == (1, 1)
        with pytest.raises(ValueError, match="5 cannot be simulated"):
            process_of(5, fails=True)


def test_defaults_that_are_named_are_the_same_simulation() -> None:
    with workers() as pool:
        assert begin(lambda: [process_of(1), process_of(1, fails=False), process_of(number=1)], pool) == (
            3,
            1,
        )
        assert process_of(1) == process_of(1, fails=False) != os.getpid()


def test_what_was_spent_is_known() -> None:
    with workers() as pool:
        begin(tables, pool)
        list(tables())
        [(name, (count, time_s))] = spent().items()
    assert name.endswith(".process_of")
    assert count == 3
    assert time_s > 0
    assert unfinished() == 0
