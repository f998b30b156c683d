"""The report: what the page and the pictures show is what the ledger says."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.charts.files import MAX_PAGE_BYTES
from penstock.charts.render import html, save_all
from penstock.charts.report import Page
from penstock.cli.app import run as main
from penstock.ledger.replica import Replica
from penstock.model.transitions import NodeStatus
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.nodes import Latency
from penstock.simulator.report.charts import sections
from penstock.simulator.report.figures import figures_of
from penstock.simulator.report.occupancy import SIZES
from penstock.simulator.report.series import (
    BINS,
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
    cdf_of,
    curve_of,
    series_of,
)
from penstock.simulator.report.timeline import EXITED, STILL, STOPPED, Timeline
from penstock.simulator.runs import Recorder, perform
from penstock.simulator.traces.jobs import TraceJob, shape_of

from .stories import ends, job, simulation

PROFILES = ("fifo", "liquid", "random", "srtf", "tiresias")
BUSY = [job(f"j{i:02}", 3 * i, 10 + 37 * (i * 7 % 11), (1, 2, 4, 8, 1, 1)[i % 6]) for i in range(40)]
SLOW_NODES = Options(latency=Latency(start_s=5, stop_s=2))
CLUSTER = "2x4+1x8"


def watched(
    jobs: Iterable[TraceJob], profile: str, cluster: str = CLUSTER, options: Options | None = None
) -> tuple[Simulation, Timeline]:
    """A run to its end, and the timeline of its ledger."""
    timeline = Timeline()
    found = simulation(jobs, profile, cluster, options, timeline.take)
    ends(found)
    return found, timeline


# -------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("options", [Options(), SLOW_NODES], ids=["quick nodes", "slow nodes"])
def test_the_ledger_tells_the_same_figures(profile: str, options: Options) -> None:
    """Whoever folds the ledger comes to the figures that the engine measured, but for the rounding to milliseconds."""
    found, timeline = watched(BUSY, profile, options=options)
    measured = found.figures(1, 1)._asdict()
    for key, value in figures_of(timeline, found.cell.head.id).items():
        if isinstance(value, str):
            assert value == measured[key], key
        else:
            assert value == pytest.approx(measured[key], abs=2e-3), key


def test_a_run_without_a_report_is_the_same_run() -> None:
    """Watching how long the placer thinks must not change what it thinks."""
    hashes = set()
    for draws in (False, True):
        recorder = Recorder(draws=draws)
        found = simulation(BUSY, "srtf", CLUSTER, sink=recorder.take)
        result = perform(found, recorder, lambda progress: True)
        hashes.add(result.figures.ledger_hash)
        assert (result.series is not None) == draws
    assert len(hashes) == 1
    assert result.series is not None
    counted = {latency.kind: latency.inputs for latency in result.series.latencies}
    assert counted["penstock.job.submitted"] == len(BUSY)
    assert sum(counted.values()) == result.figures.records - 1 - 3, (
        "all but the term and the three nodes that joined"
    )


# --------------------------------------------------------------------------------------------- charts


def areas(timeline: Timeline) -> list[tuple[int, int, int, int, int]]:
    """(node, y, height, start, end) of each bar."""
    bars = timeline.bars
    return list(zip(bars.node, bars.y, bars.height, bars.start_ms, bars.end_ms, strict=True))


def overlaps(bars: Sequence[tuple[int, int, int, int, int]]) -> list[object]:
    """Pairs of bars that lie on one another."""
    return [
        (one, other)
        for index, one in enumerate(bars)
        for other in bars[index + 1 :]
        if one[0] == other[0]
        and one[1] < other[1] + other[2]
        and other[1] < one[1] + one[2]
        and one[3] < other[4]
        and other[3] < one[4]
    ]


@pytest.mark.parametrize("profile", PROFILES)
def test_bars_never_overlap_and_cover_what_was_held(profile: str) -> None:
    """Two jobs on one GPU at one time: a picture like that would be an accident report."""
    found, timeline = watched(BUSY, profile, options=SLOW_NODES)
    timeline.close()
    bars = areas(timeline)
    assert overlaps(bars) == []
    assert all(start < end for *_, start, end in bars)
    held_s = sum(height * (end - start) for _, _, height, start, end in bars) / 1e6
    figures = found.figures(1, 1)
    assert held_s == pytest.approx(figures.gpu_allocation * 16 * figures.makespan_s, rel=0.02)
    drawn = series_of(timeline).gantt
    merged_s = float((drawn.height * (drawn.end_s - drawn.start_s)).sum())
    assert merged_s == pytest.approx(held_s), "neighbouring GPUs of one job become one bar, and none is lost"


def test_shares_of_a_gpu_lie_side_by_side() -> None:
    """Notebooks with a third of a GPU come and go; each has its own strip of the GPU's row."""
    jobs = [
        TraceJob(f"n{i}", 5.0 * i, 20.0 + 7 * (i % 3), 1, gpu_share_milli=(333, 500, 250)[i % 3])
        for i in range(24)
    ]
    _, timeline = watched(jobs, "best-fit", "1x2")
    timeline.close()
    bars = areas(timeline)
    assert overlaps(bars) == []
    strips: dict[str, int] = {}
    for index, height in zip(timeline.bars.job, timeline.bars.height, strict=True):
        job_id = timeline.jobs[index].job_id
        strips[job_id] = strips.get(job_id, 0) + height
    assert strips == {one.job_id: one.gpu_share_milli for one in jobs}, "each as high as its share"
    assert len({(node, y // 1_000) for node, y, *_ in bars}) == 2, "on both GPUs"


def test_how_bars_end() -> None:
    """a gives way to b and comes back; the run is cut short while it runs."""
    timeline = Timeline()
    found = simulation([job("a", 0, 100, 4), job("b", 10, 20, 4)], "srtf", sink=timeline.take)
    while found.now_s < 30:
        assert found.step()
    timeline.close()
    names = [timeline.jobs[index].job_id for index in timeline.bars.job]
    told = list(zip(names, timeline.bars.how, timeline.bars.attempt, strict=True))
    assert told == [("a", STOPPED, 1), ("b", EXITED, 1), ("a", STILL, 2)]
    assert timeline.preemptions == 1


@pytest.mark.parametrize("profile", ["liquid", "random", "srtf"])
def test_what_could_start_is_what_fits(profile: str) -> None:
    """At every record: count free GPUs on the nodes of the folded state, and how many jobs of a size they hold."""
    values: list[bytes] = []
    found = simulation(BUSY, profile, CLUSTER, sink=values.append)
    ends(found)
    replica, timeline = Replica(), Timeline()
    for offset, value in enumerate(values):
        assert replica.take(value, offset) is not None
        timeline.take(value)
        nodes = [node for node in replica.state.nodes.values() if node.status is NodeStatus.READY]
        largest = max((len(node.spec.gpus) for node in nodes), default=0)
        if not largest:
            continue
        for size, count in zip(SIZES, timeline.occupancy.startable(), strict=True):
            workers, each = shape_of(size, largest)
            slots = sum(node.free_gpu_mask.bit_count() // each for node in nodes)
            assert count == slots // workers, (size, offset)


def test_long_curves_keep_their_mean() -> None:
    """82,000 jobs make 160,000 steps; the drawn line has a few hundred points and the same area under it."""
    chance = np.random.default_rng(3)
    at_s = np.cumsum(chance.exponential(10.0, size=50_000))
    value = chance.integers(0, 60, size=50_000).astype(np.float64)
    end_s = float(at_s[-1]) + 5.0
    drawn = curve_of(at_s, value, end_s)
    assert len(drawn.at_s) == BINS + 1
    whole = float(value @ np.diff(np.append(at_s, end_s)))
    assert float(drawn.value[:-1] @ np.diff(drawn.at_s)) == pytest.approx(whole)
    short = curve_of(at_s[:10], value[:10], end_s)
    assert list(short.value) == [*value[:10], value[9]], "a short one is drawn as it is"


def test_distribution_curves_are_distributions() -> None:
    values = np.sort(np.random.default_rng(4).exponential(100.0, size=5_000))
    drawn = cdf_of(values)
    assert len(drawn.at_s) < 1_000
    for at_s, share in zip(drawn.at_s[1:], drawn.value[1:], strict=True):
        assert share == pytest.approx(float(np.mean(values <= at_s)))
    assert (drawn.value[0], drawn.value[-1]) == (0.0, 1.0)


def test_large_charts_are_excerpts_that_say_so() -> None:
    """Thousands of jobs on hundreds of nodes: the page stays small, shows whole bars only, and tells what it leaves out."""
    jobs = [job(f"k{i}", 2.0 * i, 30.0 + i % 50, 1 + i % 3) for i in range(600)]
    _, timeline = watched(jobs, "liquid", "40x4")
    drawn = series_of(timeline, max_bars=60)
    gantt = drawn.gantt
    assert 0 < len(gantt.job) <= 60
    first, last = gantt.window_s
    assert ((gantt.start_s < last) & (gantt.end_s > first)).all()
    everything = series_of(timeline, max_bars=10**6)
    whole = everything.gantt
    assert everything.heat is None, "nothing is left out, so no overview is needed"
    assert len(whole.job) == len(gantt.job) + gantt.left_out
    here = whole.node < len(gantt.rows)
    inside = here & (whole.start_s < last) & (whole.end_s > first)
    assert int(inside.sum()) == len(gantt.job), "all that runs in the window is drawn, also what began before"
    assert drawn.heat is not None
    [chart] = next(section for section in sections([drawn]) if section.key == "gantt").drawings
    assert f"{gantt.left_out:,} are left out" in chart.note
    widths = np.diff(drawn.heat.edges_s)
    gpu_s = float((drawn.heat.percent.astype(float) / 100 * 4 * widths).sum())
    held_s = float((whole.height * (whole.end_s - whole.start_s)).sum())
    assert gpu_s == pytest.approx(held_s, rel=0.01), "the overview holds all of it"


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


def test_a_cluster_without_gpus_has_a_report_too(tmp_path: Path) -> None:
    """SpeCon's nodes have cores only: there is no GPU to draw, but there are completion times."""
    page, folder = tmp_path / "page.html", tmp_path / "pictures"
    assert main(["simulate", "specon/fixed", "-o", "json", "--report", str(page), "--png", str(folder)]) == 0
    assert {path.stem for path in folder.iterdir()} == {"load", "completion", "latency"}


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
        "simulate", afternoon, "--cluster", CLUSTER, "--profile", "random", "--seed", "7", "-o", "json",
        "--report", str(page), "--png", str(pictures), "--ledger", str(ledger),
    )  # fmt: skip
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
    assert held[:-1] == pytest.approx([held / 16 for held in timeline.steps.held], rel=1e-5)
    assert len(table_of(charts["gantt-0-0"], "job")["job"]) == len(series_of(timeline).gantt.job)
    saved = sorted(path.name for path in pictures.iterdir())
    assert saved == [
        "completion.png", "gantt.png", "latency.png", "load.png", "queue.png", "startable.png", "waiting.png",
    ]  # fmt: skip
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
    """Last month's ledger lies in a file: its charts are those that were drawn while it ran."""
    ledger, first, second = tmp_path / "ledger.jsonl", tmp_path / "first.html", tmp_path / "second.html"
    run = ["simulate", afternoon, "--cluster", CLUSTER, "--profile", "srtf", "--ledger", str(ledger)]
    assert main([*run, "--report", str(first), "-o", "json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert main(["report", str(ledger), "--report", str(second), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ledger_hash"] == simulated["ledger_hash"]
    assert told["avg_jct_s"] == pytest.approx(simulated["avg_jct_s"], abs=2e-3)
    charts = []
    for path in (first, second):
        reader = Reader()
        reader.feed(path.read_text())
        charts.append(json.loads(reader.scripts[0]))
    del charts[0]["latency-0-0"]
    assert charts[0] == charts[1]


def test_half_a_ledger_is_refused(tmp_path: Path, afternoon: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody cuts off the old lines of a log: what they set up is missing, and that is said."""
    ledger = tmp_path / "ledger.jsonl"
    main(["simulate", afternoon, "--cluster", CLUSTER, "--ledger", str(ledger), "-o", "json"])
    capsys.readouterr()
    ledger.write_bytes(b"\n".join(ledger.read_bytes().splitlines()[100:]) + b"\n")
    assert main(["report", str(ledger)]) == 2
    assert "no line is a first record" in capsys.readouterr().err


def test_twenty_policies_on_a_large_trace_still_make_one_page() -> None:
    """Somebody compares everything that there is on 20,000 nodes; the page must still open, and go through the mail."""
    chance = np.random.default_rng(5)

    def curve() -> Curve:
        return Curve(np.sort(chance.uniform(0, 1e7, MAX_ROWS)), chance.uniform(0, 1, MAX_ROWS))

    count = MAX_BARS
    gantt = Gantt(
        [(f"a-rather-long-name-of-a-node-{index:05}", 8) for index in range(MAX_LANES // 8)],
        *(np.arange(count), chance.integers(0, MAX_LANES // 8, count)),
        *(chance.uniform(0, 8, count), chance.uniform(0, 8, count)),
        *(chance.uniform(0, 1e7, count), chance.uniform(0, 1e7, count)),
        *(np.full(count, 1_000), np.zeros(count, dtype=np.int64)),
        window_s=(0.0, 1e7),
        left_out=10**6,
    )
    cells = chance.integers(0, 101, (MAX_HEAT_ROWS, HEAT_BINS)).astype(np.uint8)
    heat = Heat(
        np.linspace(0, 1e7, HEAT_BINS + 1), cells, [f"node-{row:05}" for row in range(MAX_HEAT_ROWS)], 63
    )
    times = np.sort(chance.exponential(1e5, 100_000))
    pictures = [
        RunSeries(
            f"policy-{index}", 0, 1e7, 160_000, 20_000, curve(), curve(), curve(),
            dict.fromkeys(SIZES, curve()), dict.fromkeys(SIZES, 20_000), 1e4, times, times, gantt, heat,
            {bar: JobNote(f"a-rather-long-name-of-a-job-{bar:07}", "a-rather-long-name-of-a-model", 8.0) for bar in range(count)},
            64.0, True,
        )
        for index in range(20)
    ]  # fmt: skip
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


def test_the_readme_s_example_comes_out_as_it_stands_there(tmp_path: Path) -> None:
    """A newcomer types the example line by line; the figures of its table are those that the terminal shows."""
    text = (Path(__file__).parents[2] / "libs/penstock/simulator/README.md").read_text()
    typed = re.findall(r"^\$ penstock (.*)$", text, re.MULTILINE)
    assert [line.split()[0] for line in typed] == ["simulate", "compare", "report"]
    told = ""
    for line in typed:
        run = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *line.split()],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert run.returncode == 0, run.stderr
        told += run.stdout
    table = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("| `") and " ± " in row]
    assert len(table) == 3
    for row in table:
        for figure_told in re.findall(r"[−]?[0-9][0-9,.]*", "|".join(row[1:])):
            assert figure_told in told, row
    assert {path.name for path in tmp_path.iterdir()} == {
        "fifo.jsonl",
        "policies.html",
        "pictures",
        "fifo.html",
    }
