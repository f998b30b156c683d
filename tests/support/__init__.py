"""What several tests need: builders, drivers of cores, cells on real servers."""
