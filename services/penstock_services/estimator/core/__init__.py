"""Pure: no IO, no clock, no randomness."""
