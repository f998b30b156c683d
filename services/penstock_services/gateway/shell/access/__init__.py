"""Authentication, authorisation and TLS: bearer tokens, roles, tokens of running tasks, loopback peer."""
