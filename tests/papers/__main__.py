"""`python -m tests.papers [--quick] [--json FILE] [--page FILE]`: every table of the papers beside what comes out here."""

import importlib

from tests.papers.tables import main

MODULES = (
    "muri_tables",
    "liquid_tables",
    "sharing_tables",
    "idle_tables",
    "specon_tables",
    "genie_tables",
    "coda_tables",
    "composed_tables",
)
"""Each has `tables(quick)`."""

if __name__ == "__main__":
    main("tests.papers", *(importlib.import_module(f"tests.papers.{name}").tables for name in MODULES))
