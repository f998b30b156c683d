"""The view of a cell: what is free, on which nodes, why a task does not fit, and what-if copies. Pure."""
