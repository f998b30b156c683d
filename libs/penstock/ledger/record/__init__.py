"""Ledger records, the chain that makes them valid, and amendments of unreadable records."""
