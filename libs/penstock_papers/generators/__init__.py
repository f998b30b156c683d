"""Generators of the workloads of the papers, after their published figures."""
