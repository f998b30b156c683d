"""Settings of a cell under a profile that has settings of its own."""

from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Value
from penstock.scheduling.definition import text_of
from penstock_papers.settings import TiresiasSettings


def with_own(profile: str, own: Value, **settings: Any) -> PlacerSettings:
    """The profile with these settings of its own, and others of the cell."""
    return PlacerSettings(profile=profile, profile_settings=text_of(own), **settings)


def limited(profile: str, *limits_gpu_s: float) -> PlacerSettings:
    """Tiresias, with a queue up to each of these limits and one beyond."""
    return with_own(profile, TiresiasSettings(queue_limits_gpu_s=limits_gpu_s))
