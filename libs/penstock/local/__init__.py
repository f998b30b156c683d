"""Local installation on one machine: embedded Postgres, all services, virtual nodes,
the demo, `penstock doctor`."""
