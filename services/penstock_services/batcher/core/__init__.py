"""When the batcher plans, the planning problem, and the resulting proposal. Pure."""
