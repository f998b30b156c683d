"""Baseline schedulers: first fit, SRTF, SRSF, Tiresias, DRF, HiveD, FGD, Kubernetes, packing scores."""
