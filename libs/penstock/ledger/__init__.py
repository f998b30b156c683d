"""The ledger as pure code: records and the chain rule, the cell's state, its one fold, and the invariants."""
