"""Pure: no IO, clock or random generator."""
