"""Baselines that stop running jobs for others: SRTF, SRSF and Tiresias, by counts of free GPUs."""
