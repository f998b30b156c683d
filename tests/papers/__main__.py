"""`python -m tests.papers [--json FILE] [--page FILE]`: every table of the papers beside what comes out here."""

import importlib

from tests.papers.tables import main

MODULES = (
    "muri_tables",
    "muri_interleave",
    "coda_tables",
    "composed_tables",
    "genie_tables",
    "prediction_tables",
    "specon_tables",
    "liquid_tables",
    "sharing_tables",
    "idle_tables",
)
"""Each has `tables()`. Those with the longest simulations come first, so that all cores are busy until the end."""

if __name__ == "__main__":
    main("tests.papers", *(importlib.import_module(f"tests.papers.{name}").tables for name in MODULES))
