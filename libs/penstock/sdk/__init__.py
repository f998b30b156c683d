"""SDK for training scripts (progress, stages, checkpoints, phases), and the parser of job files."""
