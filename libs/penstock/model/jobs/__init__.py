"""A job as users describe it: `JobSpec` and its parts."""
