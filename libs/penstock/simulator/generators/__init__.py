"""Synthetic workload generators, seeded: for papers without public traces, and for users without traces."""
