"""Report of a run from its ledger: figures, time series, charts, texts."""
