"""The promises of a cell are judged by random judges that know nothing else: a sound product passes them, and
a product with one line changed does not."""

import pytest

from tests.faults.laboratory.parallel import apart, rarely_collecting
from tests.faults.promises.__main__ import LEAST_BY_ALL, LEAST_BY_LABORATORY
from tests.faults.promises.hunt import by_laboratory, hunt_all, misfits
from tests.faults.promises.judges import JUDGES, NAMES, asked
from tests.faults.promises.mutant import MUTANTS

PROMISED = 60
CI_STEP = 4
"""The CI run puts in every fourth mutant, `make mutants` and the slow test all of them."""
SEEDS = {"hostile": range(28, 33), "extremes": range(12, 13)}
"""Of a sound product in the CI run; of the others three. Those of "random" and "cell" have tests of their
own."""
JUDGED = sorted(JUDGES.keys() - {"random", "cell"})


@pytest.mark.parametrize("judge", JUDGED)
def test_a_sound_product_passes_each_judge(judge: str) -> None:
    """Whatever users, nodes, services and strangers do: nobody waits in vain, what is temporary ends, lies do
    not count, copies are whole."""
    with rarely_collecting():
        assert {seed: found for seed in SEEDS.get(judge, range(3)) if (found := asked(judge, seed, {}))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("profile", NAMES)
def test_a_sound_product_passes_many_hostile_cells(profile: str) -> None:
    found = {seed: asked("hostile", seed, {"profile": profile}) for seed in range(500, 530)}
    assert {seed: what for seed, what in found.items() if what} == {}


def test_the_laboratory_notices_what_it_is_known_to_notice() -> None:
    """A line that looked superfluous is simplified. One known seed shows each of these mutants; where another
    change of the product has moved the seed, further ones do."""
    names = [name for name, mutant in MUTANTS.items() if mutant.judge][::CI_STEP]
    survivors = [name for name in names if not apart(by_laboratory, name).judge]
    assert survivors == []


def test_enough_mutants_are_known_to_be_noticed() -> None:
    """Of all that were written against the promises, by their judges alone; and the rest has tests."""
    assert len(MUTANTS) >= PROMISED
    known = [name for name, mutant in MUTANTS.items() if mutant.judge]
    assert len(known) >= LEAST_BY_LABORATORY * len(MUTANTS)
    assert [name for name, mutant in MUTANTS.items() if not mutant.tests] == []


def test_every_mutant_fits_the_product() -> None:
    """A line that was rewritten shows by its mutant's name, not as a mutant that survives."""
    assert misfits() == []


@pytest.mark.slow
def test_laboratory_and_tests_notice_nearly_all() -> None:
    """As `make mutants`."""
    found = list(hunt_all(MUTANTS, tests=True))
    assert sum(bool(hunt.judge) for hunt in found) >= LEAST_BY_LABORATORY * len(found)
    survivors = [hunt.name for hunt in found if not hunt.noticed]
    assert len(survivors) <= (1 - LEAST_BY_ALL) * len(found), survivors
