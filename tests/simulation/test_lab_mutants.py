"""A laboratory that finds nothing may be blind: plausible bugs are put into the cores, one at a time, and must be seen."""

import pytest

from penstock.testing.lab_mutants import MUTANTS, Misfit, Mutant, hunt_all, put_in

ENOUGH = 0.95  # of the mutants


@pytest.mark.timeout(400)
def test_nearly_every_bug_is_noticed() -> None:
    """Somebody simplifies a line of a core that looked superfluous, and all other tests still pass."""
    found = hunt_all(MUTANTS)
    for name, hunt in found.items():
        print(f"{name:58} {hunt.judge or 'SURVIVED':10} seed {hunt.seed}")
    misfits = [hunt.what for hunt in found.values() if hunt.judge == "misfit"]
    assert not misfits, (
        "the code has changed; say the mutants anew in penstock.testing.lab_mutants:\n" + "\n".join(misfits)
    )
    survivors = [name for name, hunt in found.items() if not hunt.judge]
    assert len(survivors) <= (1 - ENOUGH) * len(found), survivors


def test_a_mutant_that_no_longer_fits_is_no_survivor() -> None:
    """The line that a mutant changes was rewritten long ago: it must not count as a bug that nobody noticed."""
    with pytest.raises(Misfit, match="0 times, not once"):
        put_in(Mutant("gone", "penstock.ledger.replica", "a line that is not there", ""))


def test_there_are_as_many_mutants_as_were_promised() -> None:
    """Twenty at least, in the ledger, in the placer and in the node."""
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for part in (
        "penstock.ledger.",
        "penstock.placer.core.",
        "penstock.node_reporter.core.",
        "penstock.policies.",
    ):
        assert any(mutant.module.startswith(part) for mutant in MUTANTS), part
