"""Explanations derived from the folded state: why a job waits, its position in the queue,
its expected start."""
