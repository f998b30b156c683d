"""Import of a cell's events, from a ledger's file or from the event stream of the gateway."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.ledger.record.record import RawRecord, UndecodableRecord
from penstock.ledger.replica.replica import Replica
from penstock.model.schema.errors import EventError
from penstock.model.schema.event import REGISTRY, Event
from penstock.model.wire.codec import decode_fact
from penstock.runtime.files.csv_import import BadFile, Problem
from penstock.runtime.files.json_lines import json_lines

CELL = "the cell's events"
TYPES = {model.TYPE: name for name, model in REGISTRY.items()}
"""Type of an event in the gateway's stream → its type in the ledger."""


class Fold(Protocol):
    """A reader of a ledger, such as a report."""

    @property
    def replica(self) -> Replica:
        """Holds the chain and the cell's state."""

    def see(self, record: RawRecord, n: int, event: Event) -> None:
        """The replica's hook. Raises `KeyError` for an id that no earlier event introduced."""


class Streamed(msgspec.Struct):
    """One event as the gateway streams it."""

    at_ms: int
    type: str
    data: msgspec.Raw
    seq: int = 0


@contextmanager
def _blames(source: str) -> Iterator[list[int]]:
    """Yields a list in which the caller puts the number of the line being read. Raises `BadFile` with it for
    an unreadable line."""
    lines = [0]
    try:
        yield lines
    except OSError as error:
        raise BadFile(source, [Problem(0, "", error.strerror or str(error))]) from error
    except msgspec.DecodeError as error:
        raise BadFile(source, [Problem(lines[0], "", f"no event: {error}")]) from error
    except UndecodableRecord as error:
        why = f"a fact that cannot be read: {error.kind}: {error.cause}"
        raise BadFile(source, [Problem(lines[0], "", why)]) from error
    except EventError as error:
        raise BadFile(source, [Problem(lines[0], "", f"a fact that cannot be read: {error}")]) from error
    except KeyError as error:
        why = f"{error.args[0]} was never introduced: a report needs the ledger from its first record on"
        raise BadFile(source, [Problem(lines[0], "", why)]) from error


def read_ledger(path: Path, fold: Fold) -> str:
    """Folds a ledger's file. Returns a remark on records that do not follow the chain (LAW 3), if any.

    Raises `BadFile`.
    """
    void: list[int] = []
    valid = 0
    with _blames(str(path)) as lines:
        for line, value in json_lines(path):
            lines[:] = [line]
            if fold.replica.take(value, fold.replica.offset, fold.see) is not None:
                valid += 1
            else:
                void.append(line)
    if not lines[0]:
        raise BadFile(str(path), [Problem(0, "", "empty: a ledger was expected")])
    if not valid:
        raise BadFile(str(path), [Problem(0, "", f"no ledger: none of its {len(void)} lines begins one")])
    if not void:
        return ""
    return (
        f"{path}: {len(void)} records do not follow the one before and are void; the first in line {void[0]}"
    )


def read_events(events: Iterable[bytes], fold: Fold) -> None:
    """Folds the gateway's events;
    those of a type that this version does not know are ignored. Raises `BadFile`."""
    decode = msgspec.json.Decoder(Streamed).decode
    with _blames(CELL) as lines:
        for number, value in enumerate(events, start=1):
            lines[:] = [number]
            streamed = decode(value)
            kind = TYPES.get(streamed.type)
            if kind is not None:
                event = decode_fact(kind, streamed.data)
                fold.replica.take_fact(streamed.seq, streamed.at_ms, event, fold.see)
    if not lines[0]:
        raise BadFile(CELL, [Problem(0, "", "empty: events were expected")])
