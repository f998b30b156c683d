"""Measurements: `make bench` writes bench.json and prints it as a table."""
