"""Mutants of what is temporary: measures that outlive the service which took them."""

from penstock_services.placer.core.members import silent_nodes
from penstock_services.placer.core.plans import adjustments
from tests.faults.laboratory.patching import mutant, nothing, replace

GUARD = "contention-guard"


@mutant("what a dead service took is never given back", faults="adjust", profile="penstock", lost=GUARD)
def _() -> None:
    nothing(adjustments.expired)


@mutant("what is adjusted gets no end", faults="adjust", profile="penstock", lost=GUARD)
def _() -> None:
    replace(adjustments._lasts, lambda job: False)


@mutant("a probe of cores outlives its service", faults="adjust", profile="coda", lost=GUARD)
def _() -> None:
    real = adjustments._own_cores
    replace(real, lambda task: len(task.used_cores) if task.cores.trial else real(task))


@mutant("borrowed cores are kept", faults="adjust", profile="penstock", lost=GUARD)
def _() -> None:
    real = adjustments._own_cores
    replace(real, lambda task: max(len(task.used_cores), real(task)))


@mutant("a cap of memory bandwidth outlives its service", faults="adjust", profile="penstock", lost=GUARD)
def _() -> None:
    replace(adjustments._capped, lambda task: False)


@mutant("a silent node is never proven gone", faults="hang", lost="node-reporter")
def _() -> None:
    nothing(silent_nodes.due)
