"""Parser of job model expressions (`--truth`): `constant`, `links(stages)`, `phases(colocation(gpu=k80),
launch_s=20)`.

A name, then in brackets its inner job model, if any, and its options as NAME=VALUE.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

TOKEN = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*|[(),=])")
NAME = re.compile(r"[a-z][a-z_-]*")
MAX_DEPTH = 8


class UnknownJobModel(LookupError):
    """Not a valid job model expression; the message names the valid forms."""


class Wanted(NamedTuple):
    """A parsed job model expression."""

    name: str
    inner: "Wanted | None"
    options: Mapping[str, str]


def parse(text: str) -> Wanted:
    """Raises `UnknownJobModel`."""
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        if match is None:
            raise UnknownJobModel(
                f"job model {text!r}: {text[at:].strip()[:20]!r} can stand in no job model; {FORM}"
            )
        tokens.append(match[1])
        at = match.end()
    wanted, rest = _wanted(text, tokens, 0)
    if rest != len(tokens):
        raise UnknownJobModel(f"job model {text!r}: {tokens[rest]!r} was not expected; {FORM}")
    return wanted


FORM = "write NAME, NAME(MODEL) or NAME(MODEL, OPTION=VALUE)"


def _wanted(text: str, tokens: list[str], at: int, depth: int = 1) -> tuple[Wanted, int]:
    """The job model that begins at a token, and the index after it."""
    if at >= len(tokens) or not NAME.fullmatch(tokens[at]):
        found = repr(tokens[at]) if at < len(tokens) else "its end"
        raise UnknownJobModel(f"job model {text!r}: a name was expected, not {found}; {FORM}")
    if depth > MAX_DEPTH:
        raise UnknownJobModel(f"job model {text!r}: more than {MAX_DEPTH} job models around each other")
    name, at = tokens[at], at + 1
    inner: Wanted | None = None
    options: dict[str, str] = {}
    if tokens[at : at + 1] != ["("]:
        return Wanted(name, inner, options), at
    while True:
        at += 1
        if tokens[at : at + 1] == [")"] and inner is None and not options:
            return Wanted(name, inner, options), at + 1
        if tokens[at + 1 : at + 2] == ["="] and at + 2 < len(tokens) and tokens[at + 2] not in "(),=":
            if tokens[at] in options:
                raise UnknownJobModel(f"job model {text!r}: {tokens[at]} stands twice in {name}; {FORM}")
            options[tokens[at]] = tokens[at + 2]
            at += 3
        elif inner is None and not options:
            inner, at = _wanted(text, tokens, at, depth + 1)
        else:
            raise UnknownJobModel(f"job model {text!r}: {name} needs OPTION=VALUE in this place; {FORM}")
        if tokens[at : at + 1] == [")"]:
            return Wanted(name, inner, options), at + 1
        if tokens[at : at + 1] != [","]:
            raise UnknownJobModel(
                f"job model {text!r}: ',' or ')' is missing after {tokens[at - 1]!r}; {FORM}"
            )
