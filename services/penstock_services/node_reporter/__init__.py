"""The node-reporter service: a pure core and a thin shell."""
