"""Random judges beside the laboratory's: each plays a seed, and knows the promises alone."""
