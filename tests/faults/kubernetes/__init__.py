"""Faults of a cell on Kubernetes, in virtual time."""
