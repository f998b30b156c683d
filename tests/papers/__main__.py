"""`python -m tests.papers [--json FILE] [--page FILE]`: every table of the papers beside what comes out
here."""

import importlib

from tests.papers.tables import main

MODULES = (
    "muri.muri_tables",
    "muri.muri_interleave",
    "coda.coda_tables",
    "default.composed_tables",
    "genie.genie_tables",
    "prediction.prediction_tables",
    "specon.specon_tables",
    "liquid.liquid_tables",
    "liquid.sharing_tables",
    "liquid.idle_tables",
)
"""Each has `tables()`. Those with the longest simulations come first, so that all cores are busy until the
end."""

if __name__ == "__main__":
    main("tests.papers", *(importlib.import_module(f"tests.papers.{name}").tables for name in MODULES))
