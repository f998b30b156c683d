"""Profile `penstock` beside every paper's own policy."""
