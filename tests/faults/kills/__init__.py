"""Processes, servers and disks that die under load."""
