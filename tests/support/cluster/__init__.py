"""Cells without processes: states to begin with, and the real cores that act on them."""
