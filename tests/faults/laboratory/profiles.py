"""Under which profile a run is: from its seed."""

import numpy as np

from penstock.policies.profiles import PROFILES

MIGRATING = ("specon", "balance")
CONVERGENCE = '{"alpha": 1.0, "interval_ms": 3000}'
"""Of these: a job that reports its loss converges within its minute."""
NEWER = (*MIGRATING, "genie")
NEWER_EVERY, NEWER_AT = 8, 1
"""Seeds under the newer ones. The others draw from the other profiles, so that they are the runs that they were."""
NAMES = tuple(sorted(set(PROFILES) - set(NEWER)))


def profile_of(rng: np.random.Generator, seed: int, given: str | None) -> str:
    """`given`: None for the seed's own."""
    if given is not None:
        return given
    found = NAMES[int(rng.integers(len(NAMES)))]
    return NEWER[seed // NEWER_EVERY % len(NEWER)] if seed % NEWER_EVERY == NEWER_AT else found
