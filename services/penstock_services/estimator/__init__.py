"""The estimator service: resource and run time prediction for jobs. A pure core and a thin shell."""
