"""Measurement of the machine and its tasks: inventory, utilisation, progress, contention, GPU faults."""
