"""IO around the core."""
