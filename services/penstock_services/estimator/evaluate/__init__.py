"""Checks of stored models, which the gateway runs."""
