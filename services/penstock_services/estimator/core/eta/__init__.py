"""Remaining time of a running job (ETA): loss curves, iterations, intervals."""
