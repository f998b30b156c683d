"""Output of tasks: log rotation, archive of ended tasks' logs, out-of-memory errors in the last lines."""
