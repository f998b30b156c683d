"""Limits on running tasks: cgroups, pinning to CPU cores, processor quotas, caps on memory bandwidth."""
