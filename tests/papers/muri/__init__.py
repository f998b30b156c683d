"""Muri's traces, groups and stage profiles."""
