"""A laboratory that finds nothing may be blind: plausible bugs are put in, one at a time, and must be noticed."""

import pytest

from tests.faults.laboratory.parallel import MUTANT_SEEDS, hunt_all, misfits
from tests.faults.laboratory.patching import MUTANTS, replace

ENOUGH = 0.95  # of the mutants
PROMISED = 150
CI_STEP = 9  # the CI run hunts every ninth, two hundred take minutes


@pytest.mark.timeout(1_200)
def test_nearly_every_bug_is_noticed(scale: int) -> None:
    """Somebody simplifies a line that looked superfluous, and all other tests still pass.

    The CI run directs each hunt by the mutant's scenario, and must notice all that it hunts; `make faults` hunts all of them,
    among runs with all kinds of faults.
    """
    assert len(MUTANTS) >= PROMISED
    names = list(MUTANTS)[:: CI_STEP if scale == 1 else 1]
    found = hunt_all(names, MUTANT_SEEDS, lambda hunt: None, directed=scale == 1)
    for hunt in found:
        print(f"{hunt.name:60} {hunt.rule or 'SURVIVED':10} seed {hunt.seed}")
    survivors = [hunt.name for hunt in found if not hunt.rule]
    allowed = 0 if scale == 1 else (1 - ENOUGH) * len(found)
    assert len(survivors) <= allowed, survivors


def test_every_mutant_fits_the_code() -> None:
    """A function that was renamed shows by its name, not as a mutant that survives."""
    assert misfits(list(MUTANTS)) == []


def test_a_mutant_that_no_longer_fits_is_no_survivor() -> None:
    """The function that a mutant breaks was removed long ago: it must not count as a bug that nobody noticed."""
    with pytest.raises(LookupError, match="nowhere"):
        replace(lambda: None, lambda: None)
