"""One self-contained page: no file beside it, nothing fetched from anywhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import orjson
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it ships no types

from penstock.simulator.report.charts import Chart
from penstock.simulator.report.drawing import Section
from penstock.simulator.report.plotly_form import figure

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""The page itself forbids that anything is loaded."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Of the table of figures."""

    text: str
    small: str = ""
    best: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    means: str
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True)
class Report:
    """All that the page shows."""

    title: str
    lead: Sequence[str]
    """What came out, in sentences."""
    warning: str
    """Why it is not whole; empty if it is."""
    command: str
    made_of: Sequence[tuple[str, str]]
    """Label and value: trace, cluster, truth, seeds, …"""
    ledgers: Sequence[tuple[str, int, str]]
    """Profile, seed, ledger hash."""
    settings: Mapping[str, str]
    """Profile → the placer's settings as JSON."""
    columns: Sequence[str]
    rows: Sequence[Row]
    table_note: str
    sections: Sequence[Section]


def page(report: Report) -> str:
    """HTML 5, UTF-8."""
    own = files("penstock.simulator.report")
    charts: dict[str, object] = {}
    body = [_head(report), _figures(report), *(_section(section, charts) for section in report.sections)]
    body.append(_made(report))
    data = orjson.dumps(charts).decode().replace("</", "<\\/")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(report.title)}</title>",
            f"<style>\n{own.joinpath('page.css').read_text()}</style>",
            "</head>\n<body>\n<main>",
            *body,
            "</main>",
            f'<script type="application/json" id="charts">{data}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{own.joinpath('page.js').read_text()}</script>",
            "</body>\n</html>\n",
        )
    )


def _head(report: Report) -> str:
    lead = "".join(f'<p class="lead">{escape(sentence)}</p>' for sentence in report.lead)
    warning = f'<p class="warning" role="status">{escape(report.warning)}</p>' if report.warning else ""
    links = [("figures", "Figures")]
    links += [(section.key, section.charts[0].words.title) for section in report.sections]
    links += [("made", "How this was made")]
    nav = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title in links)
    return (
        f"<header>\n<h1>{escape(report.title)}</h1>\n{warning}{lead}\n"
        f"<pre><code>{escape(report.command)}</code></pre>\n{_hashes(report)}\n"
        f'<nav aria-label="On this page">{nav}</nav>\n</header>'
    )


def _hashes(report: Report) -> str:
    """Seed and ledger hash of each run, and the settings; what is long is folded away."""
    lines = "".join(
        f"<dt>{escape(profile)}, seed {seed}</dt><dd>ledger <code>{escape(digest)}</code></dd>"
        for profile, seed, digest in report.ledgers
    )
    settings = "".join(
        f"<p>{escape(profile)}</p><pre><code>{escape(text)}</code></pre>"
        for profile, text in report.settings.items()
    )
    if not settings:
        return f"<dl>{lines}</dl>"
    folded = (
        f"<details><summary>Settings of the placer, as the ledger records them</summary>{settings}</details>"
    )
    if len(report.ledgers) <= 4:
        return f"<dl>{lines}</dl>{folded}"
    title = f"Seeds and ledger hashes of {len(report.ledgers)} runs"
    return f"<details><summary>{title}</summary><dl>{lines}</dl></details>{folded}"


def _figures(report: Report) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in report.columns)
    rows = []
    for row in report.rows:
        cells = "".join(
            f"<td{' class=best' if cell.best else ''}>{escape(cell.text)}"
            + (f"<small>{escape(cell.small)}</small>" if cell.small else "")
            + "</td>"
            for cell in row.cells
        )
        rows.append(
            f'<tr><th scope="row">{escape(row.label)}<small>{escape(row.means)}</small></th>{cells}</tr>'
        )
    return (
        f'<section id="figures">\n<h2>Figures</h2>\n<p class="says">{escape(report.table_note)}</p>\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="Figures"><table class="{"one" if len(report.columns) == 1 else "many"}">\n<thead><tr><th></th>{head}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>\n</section>"
    )


def _section(section: Section, charts: dict[str, object]) -> str:
    words = section.charts[0].words
    parts = [_part(section.key, index, chart, charts) for index, chart in enumerate(section.charts)]
    buttons = ""
    if words.part:
        buttons = "".join(
            f'<button role="tab" aria-selected="{str(not index).lower()}" aria-controls="{section.key}-{index}" '
            f'tabindex="{0 if not index else -1}">{escape(chart.words.part)}</button>'
            for index, chart in enumerate(section.charts)
        )
        buttons = f'<div class="parts" role="tablist" aria-label="Policy">{buttons}</div>\n'
    return (
        f'<section id="{section.key}">\n<h2>{escape(words.title)}</h2>\n<p class="says">{escape(words.says)}</p>\n'
        f"{buttons}{''.join(parts)}</section>"
    )


def _part(key: str, index: int, chart: Chart, charts: dict[str, object]) -> str:
    name = f"{key}-{index}"
    charts[name] = figure(chart)
    label = escape(f"{chart.words.title} {chart.words.part}. {chart.words.says}", quote=True)
    note = f'<p class="note">{escape(chart.words.note)}</p>' if chart.words.note else ""
    return (
        f'<div id="{name}"{" hidden" if index else ""}>'
        f'<div class="chart" data-chart="{name}" role="img" aria-label="{label}"></div>{note}</div>\n'
    )


def _made(report: Report) -> str:
    facts = "".join(f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in report.made_of)
    return f'<section id="made">\n<h2>How this was made</h2>\n<dl>{facts}</dl>\n</section>'
