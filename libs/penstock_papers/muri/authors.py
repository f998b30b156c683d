"""Predictions of groups as the program published with Muri makes them: period, factors, and no bound by the
iteration alone."""

from penstock.scheduling.groups.interleaving import Interleaving, authors_period_or_pair

ALONE = 1.015  # an iteration alone as a multiple of the measured one, from the authors' program
AUTHORS_FACTORS = (ALONE, 1.33, 1.5, 1.37)
"""By number of members: measured iteration of a group as a multiple of its computed period; ALONE for a
single job."""
FACTORS_UNMATCHED = (ALONE, 1.33, 1.5, 1.30)
"""The same for groups without matching."""


def authors(*, matched: bool = True, worst: bool = False) -> Interleaving:
    """Interleaving as in the program published with Muri."""
    factors = AUTHORS_FACTORS if matched else FACTORS_UNMATCHED
    return Interleaving(
        authors_period_or_pair,
        (factors[0], *(factor / ALONE for factor in factors[1:])),
        worst=worst,
        bounded=False,
    )
