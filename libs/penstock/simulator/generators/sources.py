"""Where generators find the measured tables that they rest on."""

from pathlib import Path

from penstock.runtime.csv_import import BadFile, Problem
from penstock.simulator.traces.importing import DATA_VARIABLE, data_root


def source(generator: str, where: str) -> Path:
    """A file or folder below the data. Raises `BadFile` where it is not there."""
    root = data_root()
    if root is None or not (root / where).exists():
        message = (
            f"this generator takes its times from {where}; set {DATA_VARIABLE} to the folder that holds it"
        )
        raise BadFile(f"{generator}/…", [Problem(0, "", message)])
    return root / where
