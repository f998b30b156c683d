"""Answers derived from the folded state: memory caps, ports, groups, succession, checkpoint sources."""
