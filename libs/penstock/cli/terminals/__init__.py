"""Terminals and commands in running jobs: `penstock attach` and `penstock exec`."""
