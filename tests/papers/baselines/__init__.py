"""Published schedulers on the traces of their sources."""
