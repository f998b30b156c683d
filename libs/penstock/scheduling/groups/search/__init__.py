"""Local search for groups: the jobs that run and the jobs that share GPUs."""
