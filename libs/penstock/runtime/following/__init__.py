"""Followers of the ledger and of telemetry: snapshots, digests, proposals, amended logs."""
