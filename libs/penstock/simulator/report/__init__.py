"""What happened in a run, told from its ledger alone: figures, charts, one page, pictures."""
