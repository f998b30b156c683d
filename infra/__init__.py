"""Tools of the repository: servers for development and tests, and generators of schemas and docs."""
