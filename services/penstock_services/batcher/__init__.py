"""The batcher: plans bursts of jobs at once, and who shares GPUs in turns; the placer judges and commits its plans."""
