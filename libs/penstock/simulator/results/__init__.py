"""Results of a run, folded from its ledger: metrics, time series, Gantt bars, intervals of shared GPUs."""
