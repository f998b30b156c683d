"""Logs in memory and under load, the contract of all logs, and an object store for archives."""
