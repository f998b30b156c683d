"""Checkpoints of jobs on a node: folders, requests to save, and copies from node to node."""
