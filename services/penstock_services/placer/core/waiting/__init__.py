"""Waiting jobs: attempts, backfill, batch windows, launches ahead, jobs that make way, reclaims."""
