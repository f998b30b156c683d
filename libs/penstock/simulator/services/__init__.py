"""Services of a simulated cell: adapters to the cores of estimator, batcher, migrator, contention-guard."""
