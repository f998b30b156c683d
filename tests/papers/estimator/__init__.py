"""Evaluates estimator models on measured data: cross-validation, and the papers' models beside ours."""
