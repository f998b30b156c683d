"""Message log in Postgres (the embedded log): adapter, reader, SQL schema, access control."""
