"""Batchers of tests, and stages whose plans a test can foretell."""
