"""The nouns: cell, domain, rack, node, GPU, task, gang, job, resource vector; pure values and legal moves."""
