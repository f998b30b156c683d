"""The placer service: the scheduler, sole writer of the ledger. A pure core and a thin shell."""
