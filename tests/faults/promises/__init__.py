"""Mutants against what a cell promises: its input stops nothing, nothing waits in vain, everything temporary
ends."""
