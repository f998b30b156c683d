"""Commands that act on jobs and nodes (cancel, hold, move, drain), and operators' checks and repairs."""
