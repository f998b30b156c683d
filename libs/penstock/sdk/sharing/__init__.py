"""Sharing of GPUs in a group: turns by fair file locks, and waits for CPU cores."""
