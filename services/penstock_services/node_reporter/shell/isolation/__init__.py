"""Isolation of tasks: Linux namespaces, private mounts, containers, users, cgroups entered by a shim."""
