"""Trace files: import of formats (Slurm, Helios, Kubernetes, Philly, Alibaba), validation, CSV export."""
