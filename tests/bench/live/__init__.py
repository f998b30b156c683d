"""Whole cells of real processes: from submission to start, and between two jobs."""
