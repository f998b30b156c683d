"""The gateway service: HTTP API of a cell. A pure core and a thin shell."""
