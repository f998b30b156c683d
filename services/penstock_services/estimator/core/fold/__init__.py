"""Fold of the cell's ledger into the estimator's state: live jobs, their progress, earlier attempts."""
