"""Connections of the Kubernetes backend: API server, watches, writes."""
