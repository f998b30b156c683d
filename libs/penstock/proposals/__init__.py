"""Validation of proposals and of the units of plans, by proposers and by the placer alike (LAW 1)."""
