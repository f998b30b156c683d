"""The estimator service: a pure core and a thin shell."""
