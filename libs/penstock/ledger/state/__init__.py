"""Folded state of a cell: jobs, nodes, timers, indexes. Mutable; only the fold writes."""
