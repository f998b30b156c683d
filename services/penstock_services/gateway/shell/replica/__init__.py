"""In-memory replica of the cell, folded from the ledger; alarms when the cell stands still."""
