"""The contention-guard: finds the cores that running trainings need, and keeps jobs without GPUs from slowing them."""
