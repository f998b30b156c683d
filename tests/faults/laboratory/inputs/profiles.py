"""Under which profile a run is: from its seed."""

from collections.abc import Mapping

import numpy as np

from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.service import Run
from penstock.scheduling import profiles
from penstock_services.contention_guard.core.guard import guards
from penstock_services.contention_guard.shell import service as contention_guard
from penstock_services.migrator.core.migrator import migrates
from penstock_services.migrator.shell import service as migrator

MIGRATING = tuple(name for name in profiles.names() if migrates(PlacerSettings(profile=name)))
GUARDED = tuple(name for name in profiles.names() if guards(PlacerSettings(profile=name)))
CONVERGENCE = '{"alpha": 1.0, "interval_ms": 3000}'
"""Of these: a job that reports its loss converges within its minute."""
NEWER = ("specon", "balance", "genie")
NEWEST = "coda"
POLICY_RATES = (0.0, 0.025, 0.375)
"""How often a policy raises, by seed."""
WINDOWS_MS = (0, 20_000, 0)
"""Batch windows, by seed."""
NEWER_EVERY, NEWER_AT, NEWEST_AT = 8, 1, 5
"""Seeds under the newer ones. The others draw from the other profiles, so that they are the runs that they
were."""
NAMES = tuple(sorted(set(profiles.names()) - {*NEWER, NEWEST}))


def profile_of(rng: np.random.Generator, seed: int, given: str | None) -> str:
    """`given`: None for the seed's own."""
    if given is not None:
        return given
    found = NAMES[int(rng.integers(len(NAMES)))]
    if seed % NEWER_EVERY == NEWEST_AT:
        return NEWEST
    return NEWER[seed // NEWER_EVERY % len(NEWER)] if seed % NEWER_EVERY == NEWER_AT else found


def watching(profile: str) -> Mapping[str, Run]:
    """Services that propose by telemetry, by name: those that this profile has work for."""
    found: dict[str, Run] = {}
    if profile in MIGRATING:
        found["migrator"] = migrator.run
    if profile in GUARDED:
        found["contention-guard"] = contention_guard.run
    return found
