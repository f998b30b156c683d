"""Figures, curves and bars that are folded from a ledger: what charts show is what the ledger holds."""

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.ledger.replica.replica import Replica
from penstock.model.nouns.transitions import NodeStatus
from penstock.simulator.engine import Options
from penstock.simulator.report.charts import sections
from penstock.simulator.results.figures import figures_of
from penstock.simulator.results.metrics import UNFINISHED
from penstock.simulator.results.series import BINS, cdf_of, curve_of, series_of
from penstock.simulator.results.timeline import EXITED, SIZES, STILL, STOPPED, Timeline
from penstock.simulator.runs import Recorder, perform
from penstock.simulator.traces.jobs import TraceJob, shape_of
from tests.simulation.scenarios import BUSY, CLUSTER, SLOW_NODES, ends, job, simulation, watched

PROFILES = ("fifo", "liquid", "random", "srtf", "tiresias")

# -------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("options", [Options(), SLOW_NODES], ids=["quick nodes", "slow nodes"])
def test_the_ledger_gives_the_same_figures(profile: str, options: Options) -> None:
    """A fold of the ledger gives the figures that the engine measured, but for the rounding to
    milliseconds."""
    found, timeline = watched(BUSY, profile, options=options)
    measured = found.figures(1, 1)._asdict()
    figures = dict(figures_of(timeline))
    assert sum(figures.pop(key) for key in UNFINISHED) == measured["unfinished_jobs"]
    for key, value in figures.items():
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
    columns = (bars[name].tolist() for name in ("node", "y", "height", "start_ms", "end_ms"))
    return list(zip(*columns, strict=True))


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
    shown = series_of(timeline).gantt
    merged_s = float((shown.height * (shown.end_s - shown.start_s)).sum())
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
    for index, height in timeline.bars[["job", "height"]].tolist():
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
    ends = [
        (timeline.jobs[index].job_id, how, attempt)
        for index, how, attempt in timeline.bars[["job", "how", "attempt"]].tolist()
    ]
    assert ends == [("a", STOPPED, 1), ("b", EXITED, 1), ("a", STILL, 2)]
    assert timeline.preemptions == 1


@pytest.mark.parametrize("profile", ["liquid", "random", "srtf"])
def test_what_could_start_is_what_fits(profile: str) -> None:
    """At every record: count free GPUs on the nodes of the folded state, and how many jobs of a size they
    hold."""
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
        for size, count in zip(SIZES, timeline.steps["startable"][-1], strict=True):
            workers, each = shape_of(size, largest)
            slots = sum(node.free_gpu_mask.bit_count() // each for node in nodes)
            assert count == slots // workers, (size, offset)


def test_long_curves_keep_their_mean() -> None:
    """82,000 jobs make 160,000 steps; the shown line has a few hundred points and the same area under it."""
    rng = np.random.default_rng(3)
    at_s = np.cumsum(rng.exponential(10.0, size=50_000))
    value = rng.integers(0, 60, size=50_000).astype(np.float64)
    end_s = float(at_s[-1]) + 5.0
    shown = curve_of(at_s, value, end_s)
    assert len(shown.at_s) == BINS + 1
    whole = float(value @ np.diff(np.append(at_s, end_s)))
    assert float(shown.value[:-1] @ np.diff(shown.at_s)) == pytest.approx(whole)
    short = curve_of(at_s[:10], value[:10], end_s)
    assert list(short.value) == [*value[:10], value[9]], "a short one is shown as it is"


def test_distribution_curves_are_distributions() -> None:
    values = np.sort(np.random.default_rng(4).exponential(100.0, size=5_000))
    shown = cdf_of(values)
    assert len(shown.at_s) < 1_000
    for at_s, share in zip(shown.at_s[1:], shown.value[1:], strict=True):
        assert share == pytest.approx(float(np.mean(values <= at_s)))
    assert (shown.value[0], shown.value[-1]) == (0.0, 1.0)


def test_large_charts_are_excerpts_that_state_it() -> None:
    """Thousands of jobs on hundreds of nodes: the page stays small, shows whole bars only, and counts what it
    leaves out."""
    jobs = [job(f"k{i}", 2.0 * i, 30.0 + i % 50, 1 + i % 3) for i in range(600)]
    _, timeline = watched(jobs, "liquid", "40x4")
    shown = series_of(timeline, max_bars=60)
    gantt = shown.gantt
    assert 0 < len(gantt.job) <= 60
    first, last = gantt.window_s
    assert ((gantt.start_s < last) & (gantt.end_s > first)).all()
    everything = series_of(timeline, max_bars=10**6)
    whole = everything.gantt
    assert everything.heat is None, "nothing is left out, so no overview is needed"
    assert len(whole.job) == len(gantt.job) + gantt.left_out
    here = whole.node < len(gantt.rows)
    inside = here & (whole.start_s < last) & (whole.end_s > first)
    assert int(inside.sum()) == len(gantt.job), "all that runs in the window is shown, also what began before"
    assert shown.heat is not None
    [chart] = next(section for section in sections([shown]) if section.key == "gantt").drawings
    assert f"{gantt.left_out:,} are left out" in chart.note
    widths = np.diff(shown.heat.edges_s)
    gpu_s = float((shown.heat.percent.astype(float) / 100 * 4 * widths).sum())
    held_s = float((whole.height * (whole.end_s - whole.start_s)).sum())
    assert gpu_s == pytest.approx(held_s, rel=0.01), "the overview holds all of it"


def test_what_runs_and_waits_goes_on_after_the_last_record() -> None:
    """A report of a quiet cell: one job has run for an hour since anything was recorded, and another waits
    behind it."""
    timeline = Timeline()
    found = simulation(
        [job("runs", 0, 9_000, 8), job("waits", 100, 10, 8)], "fifo", "1x8", sink=timeline.take
    )
    while found.now_s < 100:
        assert found.step()
    timeline.until(timeline.state.now_ms + 3_600_000)
    series = series_of(timeline)
    assert series.end_s == 3_700.0
    assert (series.waiting.at_s[-1], series.waiting.value[-1], series.held.value[-1]) == (3_700.0, 1, 1)
    assert series.gantt.end_s.tolist() == [3_700.0]
    assert figures_of(timeline)["gpu_allocation"] == pytest.approx(1.0)
