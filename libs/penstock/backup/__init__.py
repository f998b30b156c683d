"""Backup and restore of one cell."""
