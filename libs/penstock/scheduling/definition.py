"""Definition of a scheduling profile: what an entry point of the group `penstock.profiles` names."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import ResourceVector, Value
from penstock.model.wire.codec import decode_as, encode
from penstock.scheduling.stages.protocols import Profile

Worker = tuple[ResourceVector, tuple[str, ...]]
"""(resources, allowed GPU models) of a worker; no model: any."""
FIXES_NOTHING: Mapping[str, object] = MappingProxyType({})


class NoSettings(Value, frozen=True):
    """Form of a profile without settings of its own."""


class Definition(NamedTuple):
    """A profile: its stages, and what depends on its name elsewhere."""

    make: Callable[[PlacerSettings, Any], Profile]
    """Its stages under these settings and its own ones. Pure: equal settings give profiles that decide
    alike."""
    fixed: Mapping[str, object] = FIXES_NOTHING
    """Settings that are part of the definition, whatever was given: field of `PlacerSettings` → value."""
    reads_run_times: bool = False
    """Whether its decisions depend on predicted run times."""
    form: type[Value] = NoSettings
    """Form of its own settings: every field has a default, and its name is none of `PlacerSettings`."""
    fill: Callable[[Any, Iterable[Worker]], Any] | None = None
    """Its own settings with what a simulation takes from all workers of its trace where it is not given.
    None: nothing."""

    def own(self, settings: PlacerSettings) -> Any:
        """Its own settings, of `form`; fields that this version does not know are ignored. Raises
        `Invalid`."""
        return decode_as(self.form, settings.profile_settings.encode() or b"{}")

    def filled(self, settings: PlacerSettings, workers: Iterable[Worker]) -> PlacerSettings:
        """The settings with what `fill` adds. Raises `Invalid`."""
        if self.fill is None:
            return settings
        own = text_of(self.fill(self.own(settings), workers))
        return msgspec.structs.replace(settings, profile_settings=own)


def text_of(own: Value) -> str:
    """A profile's own settings as `PlacerSettings.profile_settings`: equal settings give equal text."""
    text = encode(own).decode()
    return "" if text == "{}" else text
