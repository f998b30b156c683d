"""Answers that routes compute: dry runs, forecasts, explanations, past states (time travel), models."""
