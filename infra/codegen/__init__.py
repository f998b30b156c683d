"""Generators of schemas, AsyncAPI and the tables in the docs, and their compatibility checks."""
