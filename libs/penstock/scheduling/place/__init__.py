"""Placement of a gang: nodes, number of workers, shares of GPUs."""
