"""Keys: signatures of nodes, tokens of running jobs, codes of log requests."""
