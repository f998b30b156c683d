"""Backend of the node-reporter for Kubernetes: one reporter for all nodes of a cluster."""
