"""Penstock on a real Kubernetes API server with hollow kubelets."""
