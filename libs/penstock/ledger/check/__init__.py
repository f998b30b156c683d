"""Invariants of a cell's state (`check`)."""
