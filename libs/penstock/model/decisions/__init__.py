"""Facts of the ledger and orders to nodes: the placer's decisions."""
