"""Faults that are injected into a run, and the nemesis that chooses them."""
