"""Folded state of one node."""
