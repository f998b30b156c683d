"""The contention-guard: finds the cores that running trainings need, and slows jobs without GPUs that contend
with them."""
