"""Job models: performance models of simulated jobs from measured tables, and interference between jobs."""
