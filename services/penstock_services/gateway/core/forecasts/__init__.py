"""Forecasts for jobs: remaining time (ETA), odds of deadlines, and the errors of earlier forecasts."""
