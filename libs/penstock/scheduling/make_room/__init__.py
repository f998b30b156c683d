"""Preemption, reservations with backfill, reclaiming of lent cores, and launches ahead of an expected end."""
