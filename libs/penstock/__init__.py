"""Penstock: an event-driven scheduler for deep-learning jobs (model, ledger, policies, log, runtime, SDK,
CLI, simulator)."""

__version__ = "0.1.0"
