"""What is drawn of estimates: how much, on which axes, and that odd runs do not spoil it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.charts.render import html, save_all
from penstock.charts.report import Page
from penstock_services.estimator.core.accuracy import accuracy_of
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import (
    Allocation,
    Card,
    EstimateSummary,
    EtaAtHalf,
    FinishedRun,
    JobInfo,
)
from penstock_services.estimator.report_charts import MAX_POINTS, limits, page_of
from penstock_services.estimator.report_tables import time_text

SECOND_MS = 1_000.0


def run(
    number: int, used_mib: float, *, tier: str = "model", version: str = "m1", eta: EtaAtHalf | None = None
) -> FinishedRun:
    """Promised 1,000 MiB; ends in the minute of its number."""
    return FinishedRun(
        number,
        f"<b>job-{number}</b>",
        JobInfo(b"%d" % number, "<script>ada</script>", "resnet50", 64, 1, 0, ()),
        Allocation(1, 1_000, 2, Card("T4", 15_360)),
        EstimateSummary(tier, version, 0.8, None, 2, 0, 1_000, 50.0),
        Run(
            ended_ms=60_000.0 * number,
            seq=number,
            run_ms=1_000,
            gpu_memory_mib=used_mib,
            gpu_utilisation_percent=40,
        ),
        "",
        eta=eta,
    )


def page(runs: list[FinishedRun]) -> Page:
    return page_of(runs, accuracy_of(runs), "penstock estimator report")


def charts(runs: list[FinishedRun], key: str) -> dict[str, Any]:
    """Title of the panel → Vega-Lite of its chart."""
    [section] = [section for section in page(runs).sections if section.key == key]
    return {panel.title: panel.chart.to_dict() for panel in section.drawings[0].panels}


def rows(chart: dict[str, Any], *columns: str) -> list[tuple[Any, ...]]:
    """Columns of the chart's data that has the first of them."""
    [values] = [values for values in chart["datasets"].values() if columns[0] in values[0]]
    return [tuple(row[column] for column in columns) for row in values]


def test_of_very_many_runs_an_even_part_is_drawn_and_the_rest_counted() -> None:
    """A year of a big cell: the page must still open, and report that points are left out; figures are of
    all."""
    runs = [run(number, 900) for number in range(MAX_POINTS + 500)]
    assert len(rows(charts(runs, "pairs")["GPU memory"], "job")) == MAX_POINTS
    pairs, figures = page(runs).sections[:2]
    assert "1,000 points are left out" in pairs.caption, "500 of memory and 500 of utilisation"
    assert figures.table is not None
    assert [cell.text for cell in figures.table.rows[0][1:3]] == ["GPU memory", f"{MAX_POINTS + 500:,}"]


def test_axes_have_numbers_that_people_write() -> None:
    """A job of a hundredth of a core, another of 48: the axis of cores had ticks at 0.0078125 and at
    0.015625."""
    runs = []
    for number, busy in enumerate((0.01, 0.5, 48.0)):
        found = run(number, 900)
        runs.append(found._replace(measured=found.measured._replace(busy_cores=busy)))
    chart = charts(runs, "pairs")["Cores"]
    for side in ("x", "y"):
        encoding = chart["layer"][-1]["encoding"][side]
        low, high = encoding["scale"]["domain"]
        ticks = [value for value in encoding["axis"]["values"] if low <= value <= high]
        assert {0.01, 0.1, 1, 10} <= set(ticks)
        assert max(len(f"{value:g}") for value in ticks) <= len("0.005"), ticks


def test_drift_shows_when_memory_grew_and_when_a_new_model_answered() -> None:
    """A library was updated at the 120th run; the model learned of it at the 180th."""
    runs = [run(n, 900 if n < 120 else 1_500, version="m1" if n < 180 else "m2") for n in range(240)]
    memory = charts(runs, "drift")["GPU memory"]
    moments = rows(memory, "runs", "at", "middle")
    before = [ratio for _, at, ratio in moments if at < 110 * 60_000]
    after = [ratio for _, at, ratio in moments if at > 130 * 60_000]
    assert before == pytest.approx([1_000 / 900] * len(before))
    assert after == pytest.approx([1_000 / 1_500] * len(after))
    assert min(len(before), len(after)) > 5
    assert rows(memory, "version") == [("m1",), ("m2",)]


def test_time_axes_are_readable_without_eval() -> None:
    """The page forbids `eval`; Vega's interpreter then reads an expression, but not the form of literal
    moments."""
    drifts = charts([run(n, 900) for n in range(60)], "drift").values()
    axes = [
        layer["encoding"]["x"] for chart in drifts for layer in chart["layer"] if "x" in layer["encoding"]
    ]
    assert axes
    assert all(set(axis["scale"]["domain"]) == {"expr"} for axis in axes)


@pytest.mark.parametrize(
    "runs",
    [
        [run(0, 900)],
        [run(0, float("nan"))],
        [run(n, 1e-9) for n in range(40)],
        [run(n, 900, tier="oracle") for n in range(30)],
        [run(0, 900, eta=EtaAtHalf(1e308, 0, 1.7e308, 1_000)), run(1, 900, eta=EtaAtHalf(0, 0, 0, 500))],
        [],
    ],
    ids=["one", "nothing-measured", "next-to-nothing-used", "a-tier-from-the-future", "absurd-times", "none"],
)
def test_odd_runs_are_drawn_without_harm(runs: list[FinishedRun], tmp_path: Path) -> None:
    """Whatever a cell has seen, the report opens; names are shown as they are, never run."""
    found = page(runs)
    text = html(found)
    assert "<script>ada" not in text
    assert "<b>job" not in text
    assert len(save_all(found.sections, tmp_path)) <= 3


def test_axes_hold_all_points_and_ticks_have_room() -> None:
    low, high = limits([900.0, 1_000.0])
    assert low < 900
    assert high > 1_000
    assert high / low == pytest.approx(4), "never so narrow that noise fills the picture"


def test_times_are_written_for_people() -> None:
    texts = [time_text(ms) for ms in (420, SECOND_MS, 90 * SECOND_MS, 7_200 * SECOND_MS, 400_000 * SECOND_MS)]
    assert texts == ["420 ms", "1.0 s", "90.0 s", "2.0 h", "4.6 d"]
