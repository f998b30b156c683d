"""Order of waiting jobs: tenants' shares, response ratio, deadlines."""
