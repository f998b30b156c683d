"""Estimates of a job's resources: tiers over the measured use of finished runs, and the bounds on them."""
