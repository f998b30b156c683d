"""Set-up of a task before its start: code, Python or conda environment, secrets, peers of its gang."""
