"""Records of finished runs: measurements, their conditions and placements, history by job key."""
