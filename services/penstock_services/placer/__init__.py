"""The placer service: a pure core and a thin shell."""
