"""The report as one page: no file beside it, nothing fetched from anywhere."""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import orjson
from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # it ships no types

from penstock_services.estimator.core.accuracy import Score
from penstock_services.estimator.evaluate.drawn import words
from penstock_services.estimator.evaluate.drawn.picture import (
    FINE_TIMES,
    WORDS,
    Drift,
    Panel,
    Picture,
    Told,
    colour_of,
    limits,
    name_of,
    place_of,
    ratio_ticks,
    shown,
    ticks_within,
)

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
"""The page itself forbids that anything is loaded."""
LINE, MISSED, BROKEN = "#0072B2", "#D55E00", "rgba(213, 60, 40, 0.10)"

Json = dict[str, Any]


def page(picture: Picture, command: str) -> str:
    """HTML 5, UTF-8."""
    own = files("penstock_services.estimator.evaluate.drawn")
    charts: dict[str, Json] = {}
    body = [_head(picture, command), _pairs(picture, charts), _figures(picture)]
    body += [_one("promises", picture, _promises(picture), charts), _drifts(picture, charts)]
    body += [
        _one("owners", picture, _owners(picture), charts),
        _one("remaining", picture, _remaining(picture), charts),
    ]
    body.append(_worst(picture))
    data = orjson.dumps(charts).decode().replace("</", "<\\/")
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            "<title>Estimates against what jobs used</title>",
            f"<style>\n{own.joinpath('page.css').read_text()}</style>",
            "</head>\n<body>\n<main>",
            *(part for part in body if part),
            "</main>",
            f'<script type="application/json" id="charts">{data}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>\n{own.joinpath('page.js').read_text()}</script>",
            "</body>\n</html>\n",
        )
    )


def _head(picture: Picture, command: str) -> str:
    found = picture.found
    lead = "".join(f'<p class="lead">{escape(line)}</p>' for line in words.lead(found))
    aside = "".join(
        f"<li>{count:,} × {escape(words.field_text(reason))} that cannot be true</li>"
        for reason, count in found.set_aside.items()
    )
    return (
        f"<header>\n<h1>Estimates against what jobs used</h1>\n{lead}"
        + (f'<ul class="aside">{aside}</ul>' if aside else "")
        + f"<pre><code>{escape(command)}</code></pre>\n</header>"
    )


def _section(key: str, picture: Picture, content: str) -> str:
    section = words.section(key, picture)
    return f'<section id="{key}">\n<h2>{escape(section.title)}</h2>\n<p class="says">{escape(section.says)}</p>\n{content}</section>'


def _one(key: str, picture: Picture, chart: Json | None, charts: dict[str, Json]) -> str:
    if chart is None:
        return ""
    return _section(key, picture, _div(key, words.section(key, picture).says, chart, charts))


def _div(name: str, label: str, chart: Json, charts: dict[str, Json]) -> str:
    charts[name] = chart
    return (
        f'<div class="chart" data-chart="{name}" role="img" aria-label="{escape(label, quote=True)}"></div>\n'
    )


# ----------------------------------------------------------------------------------------------- tables


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int, label: str) -> str:
    """The first `texts` columns are text, the others numbers. Cells are HTML already."""
    kind = [' class="text"' if column < texts else "" for column in range(len(heads))]
    head = "".join(f'<th scope="col"{kind[n]}>{escape(text)}</th>' for n, text in enumerate(heads))
    lines = "\n".join(
        "<tr>" + "".join(f"<td{kind[n]}>{cell}</td>" for n, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(label)}"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}\n</tbody>\n</table></div>\n"
    )


def _figures(picture: Picture) -> str:
    rows = [
        _figure_row(tier, name, score)
        for tier in sorted(picture.found.tiers, key=place_of)
        for name, score in picture.found.tiers[tier].items()
    ]
    if not rows:
        return ""
    heads = ("From", "Field", "Runs", "Said / used, median", "95% within a factor of", "Promise broken")
    return f'<section id="figures">\n<h2>Figures</h2>\n{_table(heads, rows, 2, "Figures")}</section>'


def _figure_row(tier: str, name: str, score: Score) -> Sequence[str]:
    broken = "" if score.broken != score.broken else f"{score.broken:.1%}"
    dot = f'<span class="dot" style="background:{colour_of(tier)}"></span>{escape(name_of(tier))}'
    return (
        dot,
        WORDS[name].title,
        f"{score.runs:,}",
        f"{score.median_ratio:.2f}",
        words.factor(score.p95_off),
        broken,
    )


def _worst(picture: Picture) -> str:
    rows = [
        (
            f"<code>{escape(job.job_id)}</code>",
            escape(job.owner),
            escape(name_of(job.tier)),
            WORDS[job.field].title,
            shown(job.field, job.said),
            shown(job.field, job.used),
            f"{job.said / job.used:.2g}",
        )
        for job in picture.found.worst
    ]
    if not rows:
        return ""
    heads = ("Job", "Owner", "From", "Field", "Said", "Used", "Said / used")
    return (
        '<section id="worst">\n<h2>Farthest off</h2>\n<p class="says">The estimates to look at first; what users asked for '
        f"themselves is not among them.</p>\n{_table(heads, rows, 4, 'Farthest off')}</section>"
    )


# ----------------------------------------------------------------------------------------------- charts


def _numbers(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _log(label: str, low: float, high: float, ticks: Sequence[tuple[float, str]]) -> Json:
    """A logarithmic axis: its range as the script wants it is set there."""
    return {
        "title": {"text": label, "standoff": 6},
        "type": "log",
        "ends": [low, high],
        "tickvals": [value for value, _ in ticks],
        "ticktext": [text for _, text in ticks],
        "zeroline": False,
        "automargin": True,
    }


def _line(x: Sequence[float], y: Sequence[float], **more: Any) -> Json:
    style = {
        "type": "scatter",
        "mode": "lines",
        "x": _numbers(x),
        "y": _numbers(y),
        "hoverinfo": "skip",
        "showlegend": False,
    }
    return style | {"line": {"width": 1.2, "color": "faint"}} | more


def _pairs(picture: Picture, charts: dict[str, Json]) -> str:
    if not picture.panels:
        return ""
    tiers = list(dict.fromkeys(group.tier for panel in picture.panels for group in panel.groups))
    legend = "".join(
        f'<li><span class="dot" style="background:{colour_of(tier)}"></span>{escape(name_of(tier))}</li>'
        for tier in tiers
    )
    parts = []
    for panel in picture.panels:
        note = words.of_panel(panel).replace("\n", " ")
        chart = _div(
            f"pairs-{panel.field}", f"{panel.title}, said against used. {note}", _pair(panel), charts
        )
        parts.append(
            f"<figure><figcaption><b>{panel.title}</b><small>{escape(note)}</small></figcaption>{chart}</figure>"
        )
    return _section(
        "pairs", picture, f'<ul class="legend">{legend}</ul>\n<div class="grid">{"".join(parts)}</div>\n'
    )


def _pair(panel: Panel) -> Json:
    ends = (panel.low, panel.high)
    data: list[Json] = []
    if panel.bound:
        corner = {"fill": "toself", "fillcolor": BROKEN, "line": {"width": 0, "color": "faint"}}
        data.append(
            _line(
                (panel.low, panel.high, panel.low, panel.low),
                (panel.low, panel.high, panel.high, panel.low),
                **corner,
            )
        )
    else:
        data += [
            _line(ends, [factor * end for end in ends], line={"width": 1, "dash": "dot", "color": "faint"})
            for factor in (0.5, 2.0)
        ]
    data.append(_line(ends, ends))
    for group in panel.groups:
        mark = {
            "size": 6,
            "opacity": 0.6,
            "color": colour_of(group.tier),
            "symbol": "x-thin" if group.tier == "user" else "circle",
        }
        if group.tier == "user":
            mark["line"] = {"width": 1.2, "color": colour_of(group.tier)}
        data.append(
            {
                "type": "scattergl" if len(group.said) > 1_000 else "scatter",
                "mode": "markers",
                "name": escape(name_of(group.tier)),
                "x": _numbers(group.said),
                "y": _numbers(group.used),
                "text": [escape(text) for text in group.text],
                "hovertemplate": f"%{{text}}<extra>{escape(name_of(group.tier))}</extra>",
                "marker": mark,
                "showlegend": False,
            }
        )
    layout = {
        "xaxis": _log("said", panel.low, panel.high, panel.ticks),
        "yaxis": _log("used", panel.low, panel.high, panel.ticks),
        "hovermode": "closest",
        "height": 340,
        "margin": {"l": 60, "r": 12, "t": 8, "b": 46},
    }
    return {"data": data, "layout": layout}


def _drifts(picture: Picture, charts: dict[str, Json]) -> str:
    parts = [
        f"<figure><figcaption><b>{drift.title}</b></figcaption>"
        + _div(
            f"drift-{drift.field}", f"{drift.title}: said / used over time", _drift(drift, picture), charts
        )
        + "</figure>"
        for drift in picture.drifts
    ]
    return _section("drift", picture, "".join(parts)) if parts else ""


def _drift(drift: Drift, picture: Picture) -> Json:
    at = list(drift.at_ms)
    low, high = limits([*drift.low, *drift.high, 1.0])
    band = {"fill": "toself", "fillcolor": "rgba(0, 114, 178, 0.16)", "line": {"width": 0, "color": LINE}}
    hover = [
        f"{middle:.2f} by the median of {runs:,} runs<br>eight of ten between {below:.2f} and {above:.2f}"
        for middle, below, above, runs in zip(drift.middle, drift.low, drift.high, drift.runs, strict=True)
    ]
    data = [
        _line([*at, *at[::-1]], [*drift.high, *drift.low[::-1]], **band) | {"x": [*at, *at[::-1]]},
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": at,
            "y": _numbers(drift.middle),
            "text": hover,
            "hovertemplate": "%{text}<extra></extra>",
            "line": {"width": 2, "color": LINE},
            "marker": {"size": 6},
            "showlegend": False,
        },
    ]
    shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"width": 1.2}}]
    shapes += [
        {
            "type": "line",
            "yref": "paper",
            "x0": moment,
            "x1": moment,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1, "dash": "dot"},
        }
        for moment, _ in picture.versions
    ]
    layout = {
        "xaxis": {
            "type": "date",
            "title": {"text": ""},
            "zeroline": False,
            "range": [picture.first_ms, picture.last_ms],
        },
        "yaxis": _log("", low, high, ratio_ticks(low, high)),
        "shapes": shapes,
        "hovermode": "closest",
        "height": 190,
        "margin": {"l": 60, "r": 12, "t": 6, "b": 42},
    }
    return {"data": data, "layout": layout}


def _rows_layout(labels: Sequence[str], x_axis: Json) -> Json:
    return {
        "xaxis": {"zeroline": False, "automargin": True, **x_axis},
        "yaxis": {
            "title": {"text": ""},
            "tickvals": list(range(len(labels))),
            "ticktext": [escape(label) for label in labels],
            "range": [len(labels) - 0.4, -0.6],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
        },
        "hovermode": "closest",
        "height": 90 + 34 * len(labels),
        "margin": {"l": 10, "r": 30, "t": 6, "b": 46},
    }


def _promises(picture: Picture) -> Json | None:
    rows = picture.promises
    if not rows:
        return None
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [row.kept.value for row in rows],
        "y": list(range(len(rows))),
        "text": [
            f"{row.kept.value:.1%} of {row.kept.of:,} runs ({row.kept.low:.1%} to {row.kept.high:.1%})"
            for row in rows
        ],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"size": 11, "color": [colour_of(row.tier) for row in rows]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [row.kept.high - row.kept.value for row in rows],
            "arrayminus": [row.kept.value - row.kept.low for row in rows],
            "thickness": 2,
            "width": 0,
        },
        "showlegend": False,
    }
    low = min(0.8, *(row.kept.low - 0.02 for row in rows))
    x_axis = {
        "title": {"text": "of the runs used no more than was promised"},
        "tickformat": ".0%",
        "range": [low, 1.01],
    }
    layout = _rows_layout([f"{row.label} ({row.kept.of:,} runs)" for row in rows], x_axis)
    at = words.PROMISED
    layout["shapes"] = [
        {
            "type": "line",
            "yref": "paper",
            "x0": at,
            "x1": at,
            "y0": 0,
            "y1": 1,
            "line": {"width": 1.5, "dash": "dash"},
        }
    ]
    return {"data": [trace], "layout": layout}


def _owners(picture: Picture) -> Json | None:
    rows = picture.over_asking
    if not rows:
        return None
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [row.asked_to_used for row in rows],
        "y": list(range(len(rows))),
        "text": [f"  {row.asked_to_used:.1f} ×, {row.runs:,} runs" for row in rows],
        "textposition": "middle right",
        "hoverinfo": "skip",
        "marker": {"size": 11, "color": colour_of("user")},
        "cliponaxis": False,
        "showlegend": False,
    }
    high = 2.2 * max(row.asked_to_used for row in rows)
    x_axis = _log("asked for / used, by the median", 0.95, high, ratio_ticks(0.95, high))
    return {
        "data": [trace],
        "layout": _rows_layout([f"{row.owner}: {words.field_text(row.field)}" for row in rows], x_axis),
    }


def _remaining(picture: Picture) -> Json | None:
    told = picture.remaining
    if not told:
        return None
    left, right = limits([one.left for one in told])
    low, high = limits([one.actual / one.left for one in told])
    data = [_line((left, right), (1.0, 1.0))]
    for held, colour, name in ((True, LINE, "inside its interval"), (False, MISSED, "outside")):
        some = [one for one in told if one.held == held]
        bars = _line((), (), line={"width": 0.6, "color": colour})
        bars["x"] = [x for one in some for x in (one.left, one.left, None)]
        bars["y"] = [
            y for one in some for y in (max(low, one.low / one.left), min(high, one.high / one.left), None)
        ]
        data.append(bars)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{name}: {len(some):,}",
                "x": _numbers([one.left for one in some]),
                "y": _numbers([one.actual / one.left for one in some]),
                "text": [_told(one) for one in some],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"size": 7, "color": colour, "opacity": 0.75},
            }
        )
    layout = {
        "xaxis": _log(
            "said to be left, at half of the run", left, right, ticks_within(FINE_TIMES, left, right)
        ),
        "yaxis": _log("was left / was said", low, high, ratio_ticks(low, high)),
        "hovermode": "closest",
        "height": 380,
        "margin": {"l": 64, "r": 12, "t": 6, "b": 46},
        "legend": {"orientation": "h", "y": 1.08},
    }
    return {"data": data, "layout": layout}


def _told(one: Told) -> str:
    said, low, high, was = (shown("run_ms", value) for value in (one.left, one.low, one.high, one.actual))
    return f"{escape(one.job_id)}: {said} said ({low} to {high}), {was} it was"
