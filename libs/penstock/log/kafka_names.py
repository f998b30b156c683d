"""Header names that are not UTF-8: Kafka's protocol forbids them, no broker checks, and aiokafka 0.14 raises at them.

It would raise for every reader of the partition, at every try: one record of a foreign client would end a cell. So a
reader that meets one asks for lenient decoding until it is past it: `read` then sees U+FFFD in the name, and whoever
reads the record judges it like any other. The lenient path is aiokafka's own pure-Python decoder (about ten times
slower), hence the switch.
"""

from typing import Any, overload

from aiokafka.consumer import fetcher
from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords, _MemoryRecordsPy

V2 = 2  # the first record format with headers

_asking: set[int] = set()
"""Ids of readers before such a record."""


class _AnyNames(bytearray):
    """Decodes anything; keys and values are taken as `bytes` and never decoded by aiokafka."""

    @overload  # type: ignore[override]
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "_AnyNames": ...
    def __getitem__(self, at: int | slice) -> "int | _AnyNames":
        found = super().__getitem__(at)
        return found if isinstance(found, int) else _AnyNames(found)

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return super().decode(encoding, "replace")


class _LenientBatch(_DefaultRecordBatchPy):  # type: ignore[misc]
    def __iter__(self) -> Any:
        found = super().__iter__()
        self._buffer = _AnyNames(self._buffer)  # type: ignore[has-type]
        return found


class _LenientRecords(_MemoryRecordsPy):  # type: ignore[misc]
    def next_batch(self) -> Any:
        raw = self._next_slice
        batch = super().next_batch()
        return _LenientBatch(raw) if raw is not None and raw[self.MAGIC_OFFSET] >= V2 else batch


def _records(raw: bytes) -> Any:
    return _LenientRecords(raw) if _asking else MemoryRecords(raw)


fetcher.MemoryRecords = _records  # what every consumer of this process decodes its fetches with


def ask(reader: object) -> None:
    """From now on, until this reader is `past` it, whatever is fetched is decoded leniently."""
    _asking.add(id(reader))


def past(reader: object) -> None:
    """It has read on, or was closed. Idempotent."""
    if _asking:
        _asking.discard(id(reader))
