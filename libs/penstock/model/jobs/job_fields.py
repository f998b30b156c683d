"""Fields of a job as users write them: key of a job file, unit, range, help, flag of `penstock submit`.

A field of `JobSpec` or of one of its parts is defined there alone: name with unit, type, range, default and
`Key`. The job file, its schema, the flags and the tables of the docs are made from `job_fields`.
"""

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

from penstock.model.nouns.types import Value

UNITS = ("_ms", "_mib", "_mbps", "_milli")
"""Ends of names of fields; a job file's key has none, and its value is written with the unit."""


class Key(Struct, frozen=True):
    """What users read of a field, and how they write it."""

    help: str = ""
    """In the job file's schema and in tables. Empty: the job file has the field under another key."""
    example: Any = None
    flag: str | None = ""
    """Help of the flag; empty: `help`; None: no flag."""
    name: str = ""
    """Key in the job file; empty: the field's name without its unit."""
    after: str = ""
    """Key that it follows in the job file; empty: that of the field before."""
    options: tuple[str, ...] = ()
    """Names of the flag; empty: made of the key."""
    metavar: str = ""
    """Empty: the values of a choice, or the example of a field with a unit."""
    choice: bool = False
    """Whether the command line itself checks and completes the values."""
    second: Any = None
    """Example of a second form of the value."""


class JobField(NamedTuple):
    """One field with a `Key`."""

    section: str
    """Key of the part it belongs to; empty: the job itself."""
    key: str
    name: str
    """In the struct."""
    unit: str
    """Of `UNITS`; empty: none."""
    kind: Any
    """Its type, without None and without the `Key`."""
    default: Any
    """NODEFAULT: it is required."""
    about: Key

    @property
    def examples(self) -> list[Any]:
        return [one for one in (self.about.example, self.about.second) if one is not None]

    @property
    def option(self) -> str:
        """Its flag, such as `--gpu-model`."""
        return self.about.options[0] if self.about.options else f"--{self.key.replace('_', '-')}"

    @property
    def parameter(self) -> str:
        """Its flag as a command's parameter, such as `gpu_model`."""
        return self.option.removeprefix("--").replace("-", "_")


def plain(hint: Any) -> Any:
    """The type without a `Key`, which only people read."""
    if get_origin(hint) is not Annotated:
        return hint
    kind, *marks = get_args(hint)
    marks = [mark for mark in marks if not isinstance(mark, Key)]
    return Annotated[kind, *marks] if marks else kind


@cache
def job_fields(kind: type[Value], section: str = "") -> tuple[JobField, ...]:
    """The fields of a struct in the order of the job file, those of its parts after each part."""
    found: list[JobField] = []
    for field in sorted(_own(kind, section), key=lambda field: bool(field.about.after)):
        keys = [other.key for other in found]
        found.insert(keys.index(field.about.after) + 1 if field.about.after else len(found), field)
    return tuple(one for field in found for one in (field, *_parts(field)))


def _parts(field: JobField) -> tuple[JobField, ...]:
    is_part = isinstance(field.kind, type) and issubclass(field.kind, Value)
    return job_fields(field.kind, field.key) if is_part else ()


def _own(kind: type[Value], section: str) -> Iterator[JobField]:
    for field in fields(kind):
        marks = get_args(field.type)[1:] if get_origin(field.type) is Annotated else ()
        about = next((mark for mark in marks if isinstance(mark, Key)), None)
        if about is None:
            continue
        unit = next((end for end in UNITS if field.name.endswith(end)), "")
        key = about.name or field.name.removesuffix(unit)
        made = field.default_factory
        default = field.default if made is NODEFAULT else made()
        yield JobField(section, key, field.name, unit, _some(plain(field.type)), default, about)


def _some(hint: Any) -> Any:
    """The type without None."""
    args = get_args(hint)
    rest = [arg for arg in args if arg is not type(None)]
    return rest[0] if (len(args), len(rest)) == (2, 1) else hint
