"""GENIE's tasks, its prediction model, and odds of deadlines."""
