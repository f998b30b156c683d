"""Workload traces and clusters: import of many file formats, strict validation, export as CSV."""
