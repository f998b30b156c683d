"""Trainings that tests run: scripts, wrappers around them, and what they write."""
