"""The projector service: a pure core and a thin shell."""
