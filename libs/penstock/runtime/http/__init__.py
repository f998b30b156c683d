"""HTTP servers of services: bounds, TLS, upgraded connections."""
