"""Step time models: how fast a job trains on which GPUs (GENIE's model, Penstock's own), and what to measure
next. Pure."""
