"""Pure: no IO, clock or random numbers."""
