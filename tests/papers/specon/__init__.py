"""SpeCon's schedules on measured loss curves."""
