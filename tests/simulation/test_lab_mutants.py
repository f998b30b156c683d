"""A laboratory that finds nothing may be blind: plausible bugs are put into the cores, one at a time, and must be seen."""

from importlib import import_module
from inspect import getsource

import pytest

from tests.faults.lab_mutants import MUTANTS, Misfit, Mutant, hunt_all, put_in

ENOUGH = 0.95  # of the mutants
PROMISED = 20


@pytest.mark.timeout(400)
def test_nearly_every_bug_is_noticed() -> None:
    """Somebody simplifies a line of a core that looked superfluous, and all other tests still pass. Every second mutant;
    `python -m tests.faults.lab_mutants` tries all."""
    found = hunt_all(MUTANTS[::2])
    assert len(found) >= PROMISED
    for name, hunt in found.items():
        print(f"{name:58} {hunt.judge or 'SURVIVED':10} seed {hunt.seed}")
    misfits = [hunt.what for hunt in found.values() if hunt.judge == "misfit"]
    assert not misfits, (
        "the code has changed; say the mutants anew in tests.faults.lab_mutants:\n" + "\n".join(misfits)
    )
    survivors = [name for name, hunt in found.items() if not hunt.judge]
    assert len(survivors) <= (1 - ENOUGH) * len(found), survivors


def test_a_mutant_that_no_longer_fits_is_no_survivor() -> None:
    """The line that a mutant changes was rewritten long ago: it must not count as a bug that nobody noticed."""
    with pytest.raises(Misfit, match="0 times, not once"):
        put_in(Mutant("gone", "penstock.ledger.replica", "a line that is not there", ""))


def test_every_mutant_still_fits_the_code() -> None:
    """Those that no CI run hunts, too: a line that was rewritten is told at once, not at the next hunt for all."""
    counts = {mutant.name: getsource(import_module(mutant.module)).count(mutant.old) for mutant in MUTANTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}


def test_there_are_as_many_mutants_as_were_promised() -> None:
    """Twenty at least, in the ledger, in the placer and in the node."""
    assert len(MUTANTS) >= PROMISED
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for part in (
        "penstock.ledger.",
        "penstock_services.placer.core.",
        "penstock_services.node_reporter.core.",
        "penstock.policies.",
    ):
        assert any(mutant.module.startswith(part) for mutant in MUTANTS), part
