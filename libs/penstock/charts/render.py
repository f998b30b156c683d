"""HTML page and PNG files of a report, from the same chart definitions: jinja2 template, vl-convert renderer.

The page is one file that loads nothing: Vega's JavaScript is in it once, and a content security policy
forbids the rest. Vega's expression interpreter makes `unsafe-eval` unnecessary.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from penstock.charts.plots import theme
from penstock.charts.report import Drawing, Page, Section

PNG_SCALE = 1.3  # pixels per px: sharp on screens with a high resolution
CAPTION_CHARACTERS = 130  # per line of a PNG file
NO_FILE_NAME = re.compile(r"[^\w.-]+")


def html(page: Page) -> str:
    """HTML 5, UTF-8. Charts are in the JSON of `<script id="charts">`: `section-drawing-panel` → Vega-Lite,
    its tables as columns.
    """
    environment = Environment(
        loader=PackageLoader("penstock.charts"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    charts = {
        f"{section.key}-{number}-{place}": _columnar(panel.chart.to_dict(validate=False))
        for section in page.sections
        for number, drawing in enumerate(section.drawings)
        for place, panel in enumerate(drawing.panels)
    }
    # Its stub lacks the default value; it takes 1.3 s, and the result is cached.
    library = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return environment.get_template("page.html").render(
        page=page,
        charts=charts,
        themes={"light": theme(), "dark": theme(dark=True)},
        library=Markup(library.replace("</script", r"<\/script")),
    )


def _columnar(spec: dict[str, Any]) -> dict[str, Any]:
    """Tables as columns, a third of the size of rows; the page's script makes rows of them again."""
    tables = {
        name: {column: [row[column] for row in rows] for column in rows[0]} if rows else {}
        for name, rows in spec["datasets"].items()
    }
    return {**spec, "datasets": tables}


def save_all(sections: Sequence[Section], folder: Path) -> Sequence[Path]:
    """One PNG file per drawing, named by its section and part. Raises `OSError`."""
    saved = []
    for section in sections:
        for drawing in section.drawings:
            part = NO_FILE_NAME.sub("-", drawing.part).strip("-") if len(section.drawings) > 1 else ""
            path = folder / f"{section.key}{'-' if part else ''}{part}.png"
            png = vl_convert.vegalite_to_png(_picture(section, drawing), scale=PNG_SCALE, config=theme())
            path.write_bytes(png)
            saved.append(path)
    return saved


def _picture(section: Section, drawing: Drawing) -> dict[str, Any]:
    """Vega-Lite of a drawing with its texts."""
    title = section.title + (f": {drawing.part}" if drawing.part else "")
    heading = alt.TitleParams(title, subtitle=_lines(f"{section.caption}\n{drawing.note}"))
    if len(drawing.panels) == 1 and not drawing.panels[0].title:
        chart: Any = drawing.panels[0].chart.properties(title=heading)
    else:
        titled = [
            panel.chart.properties(
                title=alt.TitleParams(panel.title, subtitle=_lines(panel.caption), fontSize=12)
            )
            for panel in drawing.panels
        ]
        chart = alt.concat(*titled, columns=drawing.columns).properties(title=heading)
    return dict(chart.properties(padding=16).to_dict())


def _lines(text: str) -> Any:
    """Wrapped; Vega reserves space for an empty subtitle."""
    found = [part for line in text.split("\n") for part in wrap(line, CAPTION_CHARACTERS)]
    return found or alt.Undefined
