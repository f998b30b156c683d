"""Scheduling: which job is next, where it starts, who makes room, who shares, what changes while jobs run.
Pure stages of profiles."""
