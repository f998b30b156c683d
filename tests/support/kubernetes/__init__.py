"""A simulated Kubernetes cluster for tests: an API server and kubelets in virtual time."""
