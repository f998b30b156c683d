"""Liquid's batches, sharing, idle times and estimator."""
