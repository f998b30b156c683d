"""Everything on this machine: embedded Postgres, all services, virtual nodes, the demo."""
