"""Problems of job files as text: the field, what is wrong there, and the remedy, from pydantic's errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from penstock.model.nouns.commands import INTO_A_FILE
from penstock.sdk.job_file.equivalents import key
from penstock.sdk.job_file.job_sections import NUMBER, RANGE, units_of
from penstock.sdk.job_file.units import show
from penstock.text.redaction import brief
from penstock.text.suggestion import near
from penstock.text.texts import is_utf8

Path = tuple[int | str, ...]
Sections = Mapping[str, type[BaseModel]]
"""Section of a job file → its model; the file itself is ''."""


MAX_DEPTH = 5  # levels of a job file


class Problem(NamedTuple):
    """One problem. `field`: a path such as `resources.gpus`, or `job` for the whole file."""

    field: str
    text: str
    """The problem, then the remedy."""

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def not_utf8(found: object, path: str = "", within: int = MAX_DEPTH) -> Iterator[Problem]:
    """Texts that cannot be written as UTF-8: arguments in another encoding, and escapes such as `\\ud800`.
    `within`: so many levels of lists and mappings are looked at, more than a job file has."""
    if within == 0:
        return
    if isinstance(found, str) and not is_utf8(found):
        yield Problem(path or "job", "is not UTF-8 text; write it in UTF-8, or give its bytes in a file")
    elif isinstance(found, Mapping):
        for name, value in found.items():
            yield from not_utf8(name, path, within - 1)
            yield from not_utf8(value, f"{path}.{name}" if path else str(name), within - 1)
    elif isinstance(found, Sequence) and not isinstance(found, str):
        for number, value in enumerate(found):
            yield from not_utf8(value, f"{path}.{number}", within - 1)


def _unknown(path: Path, sections: Sections) -> str:
    """The remedy for a field that does not exist: its place elsewhere, else the nearest name here."""
    section, name = ".".join(str(part) for part in path[:-1]), str(path[-1])
    known = list(sections[section].model_fields)
    for other, model in sections.items():
        if other != section and name in model.model_fields:
            return f"is not known here; write it under `{other}`" if other else "belongs at the top level"
    if remedy := key(name, section):
        return f"is not known; {remedy}"
    if (meant := near(name, known)) is not None:
        return f"is not known; did you mean `{meant}`?"
    return f"is not known; remove it, or use one of {', '.join(known)}"


def problem_of(detail: ErrorDetails, fields: Mapping[Any, Any], sections: Sections) -> Problem:
    """One of pydantic's errors as text: field, problem, remedy.
    `fields`: the job file's, as they were written."""
    path = detail["loc"]
    if path[2:] == ("[key]",) and path[0] in ("env", "secrets"):  # pydantic's mark of a wrong name
        path = path[:2]
    if path[:1] == ("workers",) and path[1:2] in ((NUMBER,), (RANGE,)):  # the form that pydantic took it for
        path = path[:1] + path[2:]
    given = detail.get("input") if len(path) < len(detail["loc"]) else _written_at(fields, path)
    return Problem(".".join(str(part) for part in path) or "job", _text(path, given, detail, sections))


def _written_at(fields: Mapping[Any, Any], path: Path) -> Any:
    """The user's value at this path, before any conversion; None where there is none."""
    found: Any = fields
    for part in path:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list) and isinstance(part, int):
            found = found[part]
        else:
            return None
    return found


def _text(path: Path, given: object, detail: ErrorDetails, sections: Sections) -> str:
    """The problem, then the remedy, for one kind of error."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path, sections)
    if kind == "missing":
        example = "max: 8" if path[0] == "workers" else "command: [python, train.py]"
        return f"is missing; add it, such as `{example}`"
    if kind == "value_error":
        return str(detail["msg"]).removeprefix("Value error, ")
    if given is None:
        return "is empty; give a value or remove the line"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = context.get("ge", context.get("le", 0))
        side = "at least" if "ge" in context else "at most"
        return f"{brief(given)} is out of range; give {side} {_human(path, bound)}"
    if kind in ("string_too_long", "string_too_short", "too_long", "too_short"):
        bound = context.get("max_length", context.get("min_length", 0))
        what = "characters" if kind.startswith("string") else "entries"
        wrong, right = ("long", "most") if "long" in kind else ("short", "least")
        remedy = f"; {INTO_A_FILE}" if path[0] == "command" and wrong == "long" else ""
        return f"is too {wrong}; give at {right} {bound} {what}{remedy}"
    if kind == "literal_error":
        return f"{brief(given)} is not known; use one of {context['expected']}"
    shown = brief(given) if kind in _QUANTITIES else _KINDS.get(type(given)) or brief(given)
    return f"{shown} {_REMEDIES.get(kind, detail['msg'])}"


_QUANTITIES = frozenset({"float_type", "finite_number", "int_type"})
_KINDS: Mapping[type, str] = {int: "a number", float: "a number", str: "this text"}
"""Text shown in place of a misplaced value: `env: PASSWORD=…` without the password."""
_REMEDIES = {
    "bool_type": "is neither true nor false; write one of them without quotes",
    "string_type": "is not a text; quote it",
    "invalid_key": "is not a field name; write names as text",
    "list_type": "is not a list; write each word by itself, such as [python, train.py]",
    "dict_type": "is not a mapping; write `name: value` lines below it",
    "model_type": "is not a mapping; write `name: value` lines below it",
    "float_type": "is not a number; write one without quotes",
    "finite_number": "is not a number; write one such as 0.5",
    "int_type": "is not a whole number; write one without quotes",
    "string_pattern_mismatch": "has characters that are not allowed; "
    "use letters, digits and . _ : / - and begin with a letter or digit",
}


def _human(path: Path, bound: float) -> str:
    """A bound in the field's human units."""
    *section, name = (str(part) for part in path)
    units = units_of(".".join(section), name)
    return str(bound) if units is None else show(int(bound), units)
