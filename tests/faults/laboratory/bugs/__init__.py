"""Mutants: plausible bugs that the laboratory must notice."""
