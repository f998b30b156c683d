"""The projector service: read models of the ledger in Postgres. A pure core and a thin shell."""
