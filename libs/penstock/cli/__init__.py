"""Command-line interface `penstock`, a client of the gateway alone."""
