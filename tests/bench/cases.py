"""What benches of scheduling measure: a profile, each with and without a standing queue."""

from typing import NamedTuple

HISTORY = "liquid"
"""Profile of the figures' history. Its order reads neither run times nor tenants."""
DEFAULT = "penstock"
"""Profile of a cell whose operator names none."""


class Case(NamedTuple):
    """`str(case)` is the end of its figures' names: `penstock_contended`."""

    profile: str
    contended: bool
    """Whether jobs wait all the time; else every job has its place at once."""

    def __str__(self) -> str:
        return f"{self.profile}_{'contended' if self.contended else 'idle'}"


CASES = tuple(Case(profile, contended) for profile in (HISTORY, DEFAULT) for contended in (False, True))
BY_NAME = {str(case): case for case in CASES}
