"""Postgres: the embedded server, binaries, roles, schema migrations."""
