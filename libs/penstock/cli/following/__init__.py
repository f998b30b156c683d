"""Jobs followed to their end: events as text, `penstock logs`, `penstock wait`."""
