"""Folded state of one job and its attempt."""
