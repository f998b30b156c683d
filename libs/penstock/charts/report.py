"""Data model of a report: sections with texts, tables and chart definitions;
no chart library is loaded here."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import altair as alt

Chart: TypeAlias = "alt.LayerChart | alt.FacetChart"


class Cell(NamedTuple):
    """A cell of a table. `colour`: that of a dot before the text."""

    text: str
    small: str = ""
    best: bool = False
    colour: str = ""


class Table(NamedTuple):
    """The first `texts` columns are text, the others numbers. The first cell of a row is its heading."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    texts: int = 1


class Panel(NamedTuple):
    """One chart, with its heading where several stand side by side."""

    chart: Chart
    title: str = ""
    caption: str = ""


class Drawing(NamedTuple):
    """One PNG file. `part` distinguishes several drawings with one title; a page has a tab for each."""

    panels: Sequence[Panel]
    note: str = ""
    part: str = ""
    columns: int = 1


class Section(NamedTuple):
    """One section. `key`: anchor and file name. `facts`: (label, text).
    `legend`: (name, colour) of all panels."""

    key: str
    title: str
    caption: str = ""
    drawings: Sequence[Drawing] = ()
    table: Table | None = None
    facts: Sequence[tuple[str, str]] = ()
    legend: Sequence[tuple[str, str]] = ()


class Folded(NamedTuple):
    """Facts that a reader unfolds, (label, code)."""

    title: str
    facts: Sequence[tuple[str, str]]


class Page(NamedTuple):
    """Texts are plain: the template escapes them."""

    title: str
    lead: Sequence[str]
    command: str
    sections: Sequence[Section]
    warning: str = ""
    """Why the report is incomplete; empty if it is not."""
    remarks: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    folded: Sequence[Folded] = ()
