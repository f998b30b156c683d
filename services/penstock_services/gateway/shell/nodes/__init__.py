"""HTTP clients of the nodes: output of tasks, and sessions with programs in them."""
