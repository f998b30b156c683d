"""The shell's floor: the log port and its adapters, Postgres, the clock, the service loop."""
