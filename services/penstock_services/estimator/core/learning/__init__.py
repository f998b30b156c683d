"""Tools of learned models: Gaussian process regression, intervals for a new group, quotas per owner."""
