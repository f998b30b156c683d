"""Exact algorithms of the papers and the baselines, as profiles. The product does not import this package."""
