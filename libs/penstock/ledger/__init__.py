"""The ledger, pure: records and the chain rule, the cell's state, its one fold, and the invariants."""
