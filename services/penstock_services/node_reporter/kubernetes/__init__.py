"""Kubernetes backend of the node-reporter."""
