"""Job models from published measurements, and the import of their tables."""
