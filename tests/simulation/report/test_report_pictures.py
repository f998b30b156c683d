"""What pictures show: owners or jobs by colour, sizes as the cluster could hold them, and what became of
unfinished jobs."""

from typing import Any

import pytest

from penstock.charts.plots import DAY_S, LEGEND_CHARACTERS, WIDTH, duration_domain
from penstock.charts.plots import legend as legend_of
from penstock.charts.render import html
from penstock.charts.report import Page
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.jobs.job_spec import JobSpec
from penstock.simulator.report.charts import sections
from penstock.simulator.report.gantt_chart import PALETTE
from penstock.simulator.results.figures import figures_of
from penstock.simulator.results.series import series_of
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import BUSY, watched
from tests.support.cluster.hand_placer import HandPlacer, node_spec


def gantt_of(jobs: list[TraceJob], cluster: str = "2x4+1x8") -> tuple[list[str], dict[str, str] | None]:
    """The group of each bar, and what the legend names."""
    found = sections([series_of(watched(jobs, "fifo", cluster)[1])])
    chart: Any = next(section for section in found if section.key == "gantt").drawings[0].panels[0].chart
    spec = chart.to_dict()
    colour = spec["layer"][1]["encoding"]["color"]
    bars = next(rows for rows in spec["datasets"].values() if rows and "group" in rows[0])
    names = dict(zip(colour["scale"]["domain"], colour["scale"]["range"], strict=True))
    return [bar["group"] for bar in bars], None if colour["legend"] is None else names


@pytest.mark.parametrize("owners", [3, 12])
def test_each_owner_has_a_colour_and_the_smallest_share_grey(owners: int) -> None:
    """Who held the cluster that night? The eight with most jobs by name, the others together."""
    jobs = [one._replace(owner=f"user-{number % owners}") for number, one in enumerate(BUSY)]
    groups, legend = gantt_of(jobs)
    assert legend is not None
    assert set(groups) == set(legend)
    assert ("other" in legend) == (owners > len(PALETTE))
    assert len(legend) == min(owners, len(PALETTE) + 1)


def test_jobs_of_one_owner_have_colours_of_their_own() -> None:
    """Few are named; of many, those submitted one after the other differ, and no legend lists forty ids."""
    groups, legend = gantt_of(BUSY[:5])
    assert legend is not None
    assert set(groups) == set(legend) == {one.job_id for one in BUSY[:5]}
    groups, legend = gantt_of(BUSY)
    assert legend is None
    assert set(groups) == {str(turn) for turn in range(len(PALETTE))}


def test_a_size_is_named_as_the_cluster_could_hold_it() -> None:
    """Nodes of two GPUs: eight GPUs are a gang of four workers, and sixteen are not there at all."""
    found = sections([series_of(watched([job._replace(gpus=1) for job in BUSY], "fifo", "4x2")[1])])
    chart: Any = next(section for section in found if section.key == "startable").drawings[0].panels[0].chart
    names = chart.to_dict()["layer"][0]["encoding"]["color"]["scale"]["domain"]
    assert names == ["1 GPU (of 8)", "2 GPUs (of 4)", "4 GPUs as 2 × 2 (of 2)", "8 GPUs as 4 × 2 (of 1)"]


def test_unfinished_jobs_are_told_apart_by_what_became_of_them() -> None:
    """A morning on a real cell: one done, one failed, one cancelled, one that no node holds, one runs, one
    waits."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 2))
    placer.run(["done"])
    placer.submit("failed")
    placer.start("failed")
    placer.finish("failed", exit_code=1)
    placer.submit("runs", gpus=2)
    placer.start("runs")
    placer.submit("waits", gpus=2)
    placer.submit("cancelled", gpus=2)
    placer.feed(JobCancelRequested(job_id="cancelled"))
    placer.submit("too-large", gpus=9, spec=JobSpec(command=("true",), queue_timeout_ms=1))
    timeline = Timeline()
    for value in placer.values:
        timeline.take(value)
    timeline.close()
    found = figures_of(timeline)
    assert (found["finished_jobs"], found["unfinished_jobs"]) == (1, 5)
    split = {key: found[key] for key in ("failed_jobs", "cancelled_jobs", "running_jobs", "waiting_jobs")}
    assert split == {"failed_jobs": 1, "cancelled_jobs": 1, "running_jobs": 1, "waiting_jobs": 2}


def test_tools_of_a_chart_show_on_hover_alone() -> None:
    """Eight charts, and no grey button on any of them until the pointer or the keyboard is there."""
    text = html(Page("title", (), "penstock", sections([series_of(watched(BUSY, "fifo")[1])])))
    style = text.partition("<style>")[2].partition("</style>")[0]
    assert ".chart.vega-embed summary { opacity: 0; }" in style
    assert ".chart.vega-embed:hover summary, .chart.vega-embed:focus-within summary { opacity: 1; }" in style


def test_jobs_of_a_cell_are_called_by_their_names() -> None:
    """Ids of a cell are random letters: who looks at the chart knows the name; a name that two jobs have is
    no answer."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 4))
    for job_id, name in (("k1", "digits"), ("k2", "sweep"), ("k3", "sweep")):
        placer.submit(job_id, spec=JobSpec(command=("true",), name=name))
        placer.start(job_id)
    placer.submit("waits", gpus=4)
    timeline = Timeline()
    for value in placer.values:
        timeline.take(value)
    timeline.until(placer.now_ms + 60_000)
    found = {section.key: section for section in sections([series_of(timeline)])}
    assert "queue" in found, "a job waits, although none has finished"
    chart: Any = found["gantt"].drawings[0].panels[0].chart
    spec = chart.to_dict()
    bars = next(rows for rows in spec["datasets"].values() if rows and "group" in rows[0])
    assert {bar["job"]: bar["name"] for bar in bars} == {"k1": "digits", "k2": "sweep k2", "k3": "sweep k3"}
    assert {bar["end"] for bar in bars} == {"still running"}
    assert spec["layer"][1]["encoding"]["color"]["scale"]["domain"] == ["digits", "sweep k2", "sweep k3"]


def test_long_names_fit_above_the_chart_and_are_told_apart() -> None:
    """Owners by their departments' addresses: the legend was twice as wide as the chart, and all labels were
    the same."""
    department = "very-long-name-of-a-department.example.org-"
    jobs = [one._replace(owner=f"{department}{number % 7}") for number, one in enumerate(BUSY)]
    groups, legend = gantt_of(jobs)
    assert legend is not None
    assert len(set(groups)) == 7
    assert all(len(label) <= LEGEND_CHARACTERS for label in legend)
    for names in ([*legend], [department * 3], ["a"] * 9, []):
        columns = legend_of(names).to_dict()["columns"]
        longest = min(LEGEND_CHARACTERS, max(map(len, names), default=0))
        assert 1 <= columns <= 5
        assert columns == 1 or columns * 7 * longest < WIDTH


@pytest.mark.parametrize(
    ("low_s", "high_s", "shown"),
    [
        (62.0, 124.0, (60, 300)),
        (45.0, 90.0, (30, 120)),
        (9e7, 2e8, (1_000 * DAY_S, 2e8)),
        (1.0, 40_000.0, (1.0, 40_000.0)),
    ],
)
def test_a_short_axis_of_time_goes_from_tick_to_tick(
    low_s: float, high_s: float, shown: tuple[float, float]
) -> None:
    """Four trainings of two minutes had an axis with one label, and a line along its edge."""
    assert duration_domain(low_s, high_s) == shown


@pytest.mark.parametrize("waiting", [1, 3])
def test_few_waiting_jobs_are_counted_whole(waiting: int) -> None:
    """One job waits for the other: half a waiting job stood on the axis."""
    jobs = [TraceJob(f"j{number}", number, 60.0, 8) for number in range(waiting + 1)]
    found = sections([series_of(watched(jobs, "fifo", "1x8")[1])])
    chart: Any = next(section for section in found if section.key == "queue").drawings[0].panels[0].chart
    axis = chart.to_dict()["layer"][0]["encoding"]["y"]
    assert axis["axis"]["values"] == list(range(waiting + 1))
    assert axis["scale"]["domain"] == [0, waiting]
