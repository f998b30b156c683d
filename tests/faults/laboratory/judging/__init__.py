"""Judges of a run."""
