"""Terms that an earlier release began, with the profile's own settings as fields of the cell's: read for
ever, into `profile_settings`."""

import json
from typing import Any

import pytest

from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.nouns.settings import Coda, PlacerSettings
from penstock.model.schema.errors import Invalid
from penstock.model.wire.codec import as_written, decode_fact
from penstock.scheduling.profiles import definition_of, known_profile
from penstock_papers.settings import (
    CodaSettings,
    FgdSettings,
    Genie,
    GenieSettings,
    Grouping,
    LiquidSettings,
    MuriSettings,
    TiresiasSettings,
    TypicalTask,
)

WRITTEN = (
    ("tiresias", {"queue_limits_gpu_s": [57600.0]}, TiresiasSettings(queue_limits_gpu_s=(57_600.0,))),
    ("liquid", {"batch_exact": True}, LiquidSettings(batch_exact=True)),
    ("muri-l", {"grouping": {"split": False}}, MuriSettings(grouping=Grouping(split=False))),
    (
        "genie",
        {"genie": {"choose": "protect", "theta": 0.0, "make_way": True}},
        GenieSettings(genie=Genie(choose="protect", theta=0.0, make_way=True)),
    ),
    ("coda", {"coda": {"max_reclaims": 1, "patience_ms": 7}}, CodaSettings(patience_ms=7)),
    (
        "fgd",
        {"typical_tasks": [{"cores": 4, "gpus": 1, "gpu_models": ["V100"], "count": 3}]},
        FgdSettings(typical_tasks=(TypicalTask(cores=4, gpus=1, gpu_models=("V100",), count=3),)),
    ),
)
"""Profile, fields that version 0.1.0 wrote in its settings, and the same as the profile's own settings."""


def read(settings: dict[str, Any]) -> PlacerSettings:
    """The settings of a term whose record has these."""
    term = {"term": 2, "placer_id": "placer-1", "settings": settings}
    fact = decode_fact("penstock.term.started.v1", json.dumps(term).encode())
    assert isinstance(fact, TermStarted)
    return fact.settings


@pytest.mark.parametrize(("profile", "fields", "own"), WRITTEN)
def test_an_old_term_decides_as_it_did(profile: str, fields: dict[str, Any], own: object) -> None:
    """A cell is upgraded in the middle of a term: its readers have the settings that the term began with, and
    a copy of the record in today's form has no field that left."""
    found = read({"profile": profile, "seed": 5, **fields})
    assert (found.profile, found.seed) == (profile, 5)
    assert definition_of(profile).own(found) == own
    assert known_profile(found) is not None
    again = as_written(TermStarted(term=2, placer_id="placer-1", settings=found))["settings"]
    assert not again.keys() & {"queue_limits_gpu_s", "batch_exact", "grouping", "genie", "typical_tasks"}
    assert read(again) == found


def test_what_the_cell_still_reads_stays_its_own() -> None:
    """Of the arrays only the patience is the profile's: the fold reads the length of their history."""
    found = read({"profile": "coda", "coda": {"history_ms": 60_000, "patience_ms": 7}})
    assert found.coda == Coda(history_ms=60_000)


def test_a_term_of_another_profile_keeps_what_it_does_not_read() -> None:
    """An operator had limits of Tiresias in the environment of a cell under `srtf`: they mean nothing there,
    and hold up nobody."""
    found = read({"profile": "srtf", "queue_limits_gpu_s": [10.0]})
    assert known_profile(found) is not None


@pytest.mark.parametrize(
    "settings", [None, [], {"profile": "srtf", "coda": 3}, {"genie": 1, "profile_settings": 7}]
)
def test_what_was_never_a_term_is_refused_with_its_fields(settings: Any) -> None:
    """Bytes from a broken writer stop a reader with a message, not with an error of its own."""
    with pytest.raises(Invalid, match="settings"):
        read(settings)
