"""Batch placement of a burst of waiting jobs by the grouping genetic algorithm (GGA)."""
