"""Files: task logs and their archive, imports, times, watches."""
