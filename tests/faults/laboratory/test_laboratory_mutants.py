"""A laboratory that finds nothing may be blind: plausible bugs are put in, one at a time, and must be
noticed."""

import pytest

from tests.faults.laboratory.parallel import MUTANT_SEEDS, apart, hunt, misfits
from tests.faults.laboratory.patching import MUTANTS, replace

UNNOTICED = 0.05  # of the mutants, at most, among runs with all kinds of faults
PROMISED = 150
PARTS = 2
IN_CI = (
    "a cancelled job keeps its target",
    "a frozen cell gives up nodes",
    "a job that is held moves",
    "a next member comes after a job that runs on",
    "a node compares no tokens of adjustments",
    "a node ends a task long after its lease",
    "a placement forgets the group that it belongs to",
    "a plan is valid for ever",
    "a proposal may take what is not free",
    "a record need not be the next one",
    "a record that was refused counts as written",
    "a run time-out stops nobody",
    "a service may slow trainings",
    "adjustments are not repeated",
    "an older boot's departure counts",
    "each member of a group is booked with all of its place",
    "lost attempts cost the user his own",
    "nobody asks whether the memory of a GPU is enough for all members",
    "nobody is killed when the grace is over",
    "stops are not repeated by a new term",
    "the estimator forgets what it had not estimated",
)
"""Those that the CI run hunts: every ninth of the list as it was when they were chosen, by name, so that a
new one moves none. Each is noticed at its first seed; all of the list take half an hour."""


@pytest.mark.parametrize("part", range(PARTS), ids=[f"part-{n}-of-{PARTS}" for n in range(1, PARTS + 1)])
def test_nearly_every_bug_is_noticed(part: int, scale: int) -> None:
    """Somebody simplifies a line that looked superfluous, and all other tests still pass.

    The CI run directs each hunt by the mutant's scenario, and must notice all that it hunts; `make faults`
    hunts all of them, among runs with all kinds of faults.
    """
    assert len(MUTANTS) >= PROMISED
    directed = scale == 1
    names = (IN_CI if directed else tuple(MUTANTS))[part::PARTS]
    survivors = []
    for name in names:
        found = apart(lambda name=name: hunt(name, MUTANT_SEEDS, directed=directed))
        print(f"{found.name:60} {found.rule or 'SURVIVED':10} seed {found.seed}")
        survivors += [] if found.rule else [name]
    assert len(survivors) <= (0 if directed else UNNOTICED * len(names)), survivors


def test_every_mutant_fits_the_code() -> None:
    """A function that was renamed shows by its name, not as a mutant that survives."""
    assert apart(misfits, list(MUTANTS)) == []


def test_a_mutant_that_no_longer_fits_is_no_survivor() -> None:
    """The function that a mutant breaks was removed long ago: it must not count as a bug that nobody
    noticed."""
    with pytest.raises(LookupError, match="nowhere"):
        replace(lambda: None, lambda: None)


def test_a_mutant_with_other_arguments_fits_no_more() -> None:
    """The function got a parameter. The mutant of the former one dies in each run, which looks like a bug
    that is noticed."""
    with pytest.raises(LookupError, match="other arguments now"):
        replace(lambda node, *, shared: "", lambda node: "")
