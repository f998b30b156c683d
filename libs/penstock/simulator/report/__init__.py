"""Report of a run from its ledger: metrics, time series, charts, texts."""
