"""CODA's cluster: resource arrays, cores, contention."""
