"""`penstock estimator evaluate`: how well models predict measured runs that they were not shown. Offline."""
