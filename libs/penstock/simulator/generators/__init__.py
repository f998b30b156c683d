"""Workloads made by rule from a seed: for papers without public traces, and for users without any."""
