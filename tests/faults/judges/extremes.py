"""Random cells whose inputs lie at the ends of their legal ranges, read by every reader.

Rule `read`: what a placer writes about them is decodable, its rows hold in the tables, and each fold is the
placer's own.
"""

from tests.faults.judges.cell_rules import Broken
from tests.faults.random_cells import at_extremes

JOBS = 40


def play(seed: int) -> None:
    """Raises `Broken`."""
    found = at_extremes(seed, JOBS)
    if found.what:
        raise Broken(f"read: {found.what}")
