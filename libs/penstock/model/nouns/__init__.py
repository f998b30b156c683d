"""Nouns of a cluster: job, gang, task, node, GPU, settings, legal transitions."""
