"""Types of a cluster (cell, domain, rack, node, GPU, task, gang, job), events,
and state transitions; pure values."""
