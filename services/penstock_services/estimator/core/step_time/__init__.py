"""How fast a job trains on which GPUs: GENIE's model, our own, and what to measure next. Pure."""
