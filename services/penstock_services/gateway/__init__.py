"""The gateway service: a pure core and a thin shell."""
