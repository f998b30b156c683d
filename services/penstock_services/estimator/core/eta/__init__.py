"""How long a running job still takes: loss curves, iterations, intervals."""
