"""The report: page and pictures show what the ledger holds."""

import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.charts.files import MAX_PAGE_BYTES
from penstock.charts.render import html, save_all
from penstock.charts.report import Page
from penstock.cli.app import run as main
from penstock.simulator.report.charts import sections
from penstock.simulator.results.series import (
    HEAT_BINS,
    MAX_BARS,
    MAX_HEAT_ROWS,
    MAX_LANES,
    MAX_ROWS,
    Curve,
    Gantt,
    Heat,
    JobNote,
    RunSeries,
    series_of,
)
from penstock.simulator.results.sharings import ALONE
from penstock.simulator.results.timeline import SIZES, Timeline
from tests.simulation.scenarios import BUSY, CLUSTER, SLOW_NODES, ends, job, simulation, watched
from tests.simulation.small_tables import write_tables


def test_where_nobody_waits_no_chart_of_waiting_is_drawn() -> None:
    """Two jobs on an idle cluster: an empty chart would only puzzle."""
    _, timeline = watched([job("a", 0, 100), job("b", 10, 50)], "fifo")
    keys = {section.key for section in sections([series_of(timeline)])}
    assert keys == {"load", "completion", "startable", "gantt"}


def test_where_all_jobs_take_less_than_a_second_there_is_no_chart_of_their_times() -> None:
    """A smoke test of a cluster: three jobs of a few milliseconds, two of which wait for the first."""
    jobs = [job(name, 0, 0.2, 8) for name in "abc"]
    _, timeline = watched(jobs, "fifo", "1x8")
    found = sections([series_of(timeline)])
    assert {section.key for section in found} == {"load", "queue", "startable", "gantt"}
    assert "queue-0-0" in html(Page("short", (), "", found))


def test_a_cluster_without_gpus_has_a_report_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SpeCon's nodes have cores only: there is no GPU to draw, but there are completion times."""
    monkeypatch.setenv("PENSTOCK_DATA", str(write_tables(tmp_path / "data")))
    page, folder = tmp_path / "page.html", tmp_path / "pictures"
    assert main(["simulate", "specon/fixed", "-o", "json", "--report", str(page), "--png", str(folder)]) == 0
    assert {path.stem for path in folder.iterdir()} == {"load", "completion"}


# ----------------------------------------------------------------------------------------------- page


def table_of(chart: dict[str, Any], column: str) -> dict[str, list[Any]]:
    """The chart's first table that has this column; column → values."""
    return next(columns for columns in chart["datasets"].values() if column in columns)


class Reader(HTMLParser):
    """What a page loads, its scripts and the cells of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.cells: dict[str, str] = {}
        self._row = ""
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside.append(tag)
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "srcset", "data", "action", "poster")
        ]
        if tag == "link" or (tag == "a" and not (dict(attrs).get("href") or "").startswith("#")):
            self.loads.append(str(attrs))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        here = self._inside[-1] if self._inside else ""
        if here == "script":
            self.scripts[-1] += data
        if here == "th":
            self._row = data
        if here == "td":
            self.cells.setdefault(self._row, data)


@pytest.fixture
def afternoon(tmp_path: Path) -> str:
    path = tmp_path / "afternoon.csv"
    lines = [f"{one.job_id},{one.submit_s},{one.duration_s},{one.gpus}" for one in BUSY]
    path.write_text("\n".join(["job_id,submit_s,duration_s,gpus", *lines, ""]))
    return str(path)


def test_one_file_with_the_figures_and_nothing_from_elsewhere(tmp_path: Path, afternoon: str) -> None:
    """The page is mailed to a colleague who opens it in a train: by the real command, once."""
    page, pictures, ledger = tmp_path / "page.html", tmp_path / "pictures", tmp_path / "ledger.jsonl"
    arguments = (
        "simulate",
        afternoon,
        "--cluster",
        CLUSTER,
        "--profile",
        "random",
        "--seed",
        "7",
        "-o",
        "json",
        "--report",
        str(page),
        "--png",
        str(pictures),
        "--ledger",
        str(ledger),
    )
    run = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    text = page.read_text()
    assert len(text) < 15_000_000
    reader = Reader()
    reader.feed(text)
    assert reader.loads == []
    assert "default-src 'none'" in text, "the page itself forbids to load anything"
    own = re.sub(
        r'"\$schema":"[^"]*"', "", text.replace(reader.scripts[2], "")
    )  # names a version, is not loaded
    assert not re.search(r"@import|url\(|https?://", own), "but for the chart library, no address in it"
    assert text.count("vegaEmbed=") == 1, "the chart library is in it once"
    assert reader.cells["Mean completion time"] == f"{figures['avg_jct_s']:,.1f} s"
    assert reader.cells["GPU allocation"] == f"{100 * figures['gpu_allocation']:.2f} %"
    assert reader.cells["Finished jobs"] == "40"
    for needed in (
        figures["ledger_hash"],
        "random, seed 7",
        "--profile random --seed 7",
        "&#34;profile&#34;:&#34;random&#34;",
    ):
        assert needed in text
    charts = json.loads(reader.scripts[0])
    load = table_of(charts["load-0-0"], "y")
    timeline = Timeline()
    for line in ledger.read_bytes().splitlines():
        timeline.take(line)
    held = [y for y, name in zip(load["y"], load["series"], strict=True) if name == "held by jobs"]
    assert held[:-1] == pytest.approx(timeline.steps["held"] / 16, rel=1e-5)
    assert len(table_of(charts["gantt-0-0"], "job")["job"]) == len(series_of(timeline).gantt.job)
    saved = sorted(path.name for path in pictures.iterdir())
    assert saved == [
        "completion.png",
        "gantt.png",
        "load.png",
        "queue.png",
        "startable.png",
        "waiting.png",
    ]
    assert all((pictures / name).read_bytes().startswith(b"\x89PNG") for name in saved)
    sizes = {name: struct.unpack(">II", (pictures / name).read_bytes()[16:24]) for name in saved}
    assert all(width > 1_000 and height > 150 for width, height in sizes.values()), sizes


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    """A file and a model may be named like a script; the page shows the names and does not run them."""
    path, page = tmp_path / "<img src=x onerror=alert(1)>.csv", tmp_path / "page.html"
    path.write_text("job_id,submit_s,duration_s,gpus\na,0,1,1\n")
    assert main(["simulate", str(path), "--report", str(page), "-o", "json"]) == 0
    reader = Reader()
    reader.feed(page.read_text())
    assert reader.loads == []
    assert len(reader.scripts) == 4
    timeline = Timeline()
    found = simulation([job("a", 0, 1)], "fifo", sink=timeline.take)
    ends(found)
    timeline.jobs[0].model = "<b>bold</b>"
    timeline.jobs[0].job_id = "</script><script>alert(1)</script>"
    text = html(Page("", (), "", sections([series_of(timeline)])))
    reader = Reader()
    reader.feed(text)
    assert len(reader.scripts) == 4
    assert "<b>" not in text
    bars = table_of(json.loads(reader.scripts[0])["gantt-0-0"], "job")
    assert bars["model"] == ["<b>bold</b>"], "data, and no code"
    assert bars["job"] == ["</script><script>alert(1)</script>"]


def test_a_ledger_gives_the_page_of_its_run(
    tmp_path: Path, afternoon: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last month's ledger lies in a file: its charts are those that were made while it ran."""
    ledger, first, second = tmp_path / "ledger.jsonl", tmp_path / "first.html", tmp_path / "second.html"
    run = ["simulate", afternoon, "--cluster", CLUSTER, "--profile", "srtf", "--ledger", str(ledger)]
    assert main([*run, "--report", str(first), "-o", "json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert main(["report", str(ledger), "--report", str(second), "-o", "json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["ledger_hash"] == simulated["ledger_hash"]
    assert reported["avg_jct_s"] == pytest.approx(simulated["avg_jct_s"], abs=2e-3)
    charts = []
    for path in (first, second):
        reader = Reader()
        reader.feed(path.read_text())
        charts.append(json.loads(reader.scripts[0]))
    assert charts[0] == charts[1]


def test_half_a_ledger_is_refused(tmp_path: Path, afternoon: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody cuts off the old lines of a log: what they set up is missing, and the error names it."""
    ledger = tmp_path / "ledger.jsonl"
    main(["simulate", afternoon, "--cluster", CLUSTER, "--ledger", str(ledger), "-o", "json"])
    capsys.readouterr()
    ledger.write_bytes(b"\n".join(ledger.read_bytes().splitlines()[100:]) + b"\n")
    assert main(["report", str(ledger)]) == 2
    assert "lines begins one" in capsys.readouterr().err


def test_twenty_policies_on_a_large_trace_still_make_one_page() -> None:
    """Somebody compares everything that there is on 20,000 nodes; the page must still open, and go through
    the mail."""
    rng = np.random.default_rng(5)

    def curve() -> Curve:
        return Curve(np.sort(rng.uniform(0, 1e7, MAX_ROWS)), rng.uniform(0, 1, MAX_ROWS))

    count = MAX_BARS
    gantt = Gantt(
        [(f"a-rather-long-name-of-a-node-{index:05}", 8) for index in range(MAX_LANES // 8)],
        *(np.arange(count), rng.integers(0, MAX_LANES // 8, count)),
        *(rng.uniform(0, 8, count), rng.uniform(0, 8, count)),
        *(rng.uniform(0, 1e7, count), rng.uniform(0, 1e7, count)),
        *(np.full(count, 1_000), np.zeros(count, dtype=np.int64)),
        sharing=np.full(count, ALONE),
        place=np.zeros(count, dtype=np.int64),
        parts=np.ones(count, dtype=np.int64),
        sharings={},
        window_s=(0.0, 1e7),
        left_out=10**6,
    )
    cells = rng.integers(0, 101, (MAX_HEAT_ROWS, HEAT_BINS)).astype(np.uint8)
    heat = Heat(
        np.linspace(0, 1e7, HEAT_BINS + 1), cells, [f"node-{row:05}" for row in range(MAX_HEAT_ROWS)], 63
    )
    times = np.sort(rng.exponential(1e5, 100_000))
    pictures = [
        RunSeries(
            f"policy-{index}",
            0,
            1e7,
            160_000,
            20_000,
            curve(),
            curve(),
            curve(),
            dict.fromkeys(SIZES, curve()),
            dict.fromkeys(SIZES, 20_000),
            1e4,
            times,
            times,
            gantt,
            heat,
            {
                bar: JobNote(f"a-rather-long-name-of-a-job-{bar:07}", "a-rather-long-name-of-a-model", 8.0)
                for bar in range(count)
            },
            64.0,
            True,
        )
        for index in range(20)
    ]
    text = html(Page("all", (), "penstock", sections(pictures)))
    assert len(text) < MAX_PAGE_BYTES


def test_every_chart_can_be_drawn_both_ways(tmp_path: Path) -> None:
    """A comparison of three policies: as many figures of the page as pictures, none of them empty."""
    pictures = [
        series_of(watched(BUSY, profile, options=SLOW_NODES)[1]) for profile in ("fifo", "srtf", "random")
    ]
    found = sections(pictures)
    drawings = [drawing for section in found for drawing in section.drawings]
    assert {section.key for section in found} == {
        "load",
        "queue",
        "completion",
        "waiting",
        "startable",
        "gantt",
    }
    reader = Reader()
    reader.feed(html(Page("three", (), "penstock", found)))
    charts = json.loads(reader.scripts[0])
    tables = [table for chart in charts.values() for table in chart["datasets"].values()]
    assert all(len(next(iter(table.values()))) for table in tables), "none is empty"
    assert len(save_all(found, tmp_path)) == len(drawings) == len(charts) == 3 + 1 + 3 + 3
    colours = {
        name: layer["encoding"]["color"]["scale"]
        for name, chart in charts.items()
        for layer in chart["layer"][:1]
        if name.partition("-")[0] in ("queue", "completion", "waiting")
    }
    assert len(colours) == 3
    assert all(scale["domain"] == ["fifo", "srtf", "random"] for scale in colours.values())
    assert len({tuple(scale["range"]) for scale in colours.values()}) == 1, (
        "a policy has one colour everywhere"
    )


README = Path(__file__).parents[3] / "libs/penstock/simulator/README.md"


def example() -> tuple[list[str], str]:
    """What the example has the reader type, and the whole page."""
    text = README.read_text()
    section = text.partition("## Which policy is better?")[2].partition("\n## ")[0]
    return re.findall(r"^\$ penstock (.*)$", section, re.MULTILINE), text


@pytest.mark.slow
def test_the_readme_s_example_comes_out_as_it_stands_there(tmp_path: Path) -> None:
    """A newcomer types the example line by line: the figures of its table are those that the terminal shows,
    and all is drawn."""
    typed, text = example()
    assert [line.split()[0] for line in typed] == ["simulate", "compare", "report"]
    output = ""
    for line in typed:
        run = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *line.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert run.returncode == 0, run.stderr
        output += run.stdout
    table = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| `") and " ± " in row]
    assert len(table) == 3
    for row in table:
        for figure in re.findall(r"[−]?[0-9][0-9,.]*", "|".join(row[1:])):
            assert figure in output, row
    assert {path.name for path in tmp_path.iterdir()} == {
        "fifo.jsonl",
        "policies.html",
        "pictures",
        "fifo.html",
    }
