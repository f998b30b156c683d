"""Runtime of the services: process entry, settings, crash-only restart, Postgres, snapshots,
process pool, tracing."""
