"""The batcher: plans bursts of jobs at once, and which jobs share GPUs in turns; the placer validates and
commits its plans."""
