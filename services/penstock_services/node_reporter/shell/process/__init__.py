"""Processes of tasks: fork server (launcher), supervisor (shim), stop by signals, terminal, exit records."""
