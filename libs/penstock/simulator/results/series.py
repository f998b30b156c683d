"""Time series and Gantt bars of one run, bounded in size:
small enough for charts and to send between processes."""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import WHOLE_GPU
from penstock.simulator.results.sharings import ALONE, Sharing, longest
from penstock.simulator.results.timeline import SIZES, Job, Rows, Timeline
from penstock.simulator.traces.jobs import Shape

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_ROWS = 1_200  # of a curve with every step; longer ones become means of bins
BINS = 800
MAX_BARS = 4_000  # of a Gantt chart that a browser still draws without delay
MIN_LANES, MAX_LANES = (
    64,
    256,
)  # GPUs of a Gantt chart: enough to show the placements, few enough to distinguish them
HALVINGS = 40
MAX_HEAT_ROWS = 160
HEAT_BINS = 320
QUANTILES = (0.5, 0.9, 0.99, 1.0)
CDF_POINTS = 600
ID_CHARACTERS = 12  # of a job's id beside a name that several have
MAX_TURNS = 4  # groups whose turns are drawn
MAX_DETAILED = 6  # policies with charts of their own, so that a page stays below its bound


class Curve(NamedTuple):
    """Step function: `value[i]` holds from `at_s[i]` until the next;
    the last point repeats the value at the end."""

    at_s: Reals
    value: Reals


class Gantt(NamedTuple):
    """Rectangles, one column per field. `y`, `height` in GPUs, `y` from the first GPU of the node.

    `rows`: the nodes as (id, its GPUs); `node` is an index of `rows`. `window_s`: the shown part of the time;
    `left_out`: number of bars on other nodes or outside the window.
    """

    rows: Sequence[tuple[str, int]]
    job: Integers
    node: Integers
    y: Reals
    height: Reals
    start_s: Reals
    end_s: Reals
    attempt: Integers
    how: Integers
    sharing: Integers
    """`ALONE`, or a key of `sharings`."""
    place: Integers
    parts: Integers
    """Its height is divided into `parts`, of which it has the one at `place`."""
    sharings: Mapping[int, Sharing]
    window_s: tuple[float, float]
    left_out: int


class Heat(NamedTuple):
    """Share of each node's GPUs that was held. Shape (rows, bins), 0 … 100. `per_row`: nodes averaged into
    one row."""

    edges_s: Reals
    percent: NDArray[np.uint8]
    labels: Sequence[str]
    per_row: int


class Latency(NamedTuple):
    """Quantiles of the placer's wall time for one type of input, µs at `QUANTILES`."""

    kind: str
    inputs: int
    micros: Sequence[float]


class JobNote(NamedTuple):
    """Labels of a bar's job."""

    job_id: str
    model: str
    gpus: float
    owner: str = ""
    label: str = ""
    """Its name, with its id if several jobs of the chart have that name."""


@dataclass(frozen=True, slots=True)
class RunSeries:
    """All chart data of one run. Seconds since the first record."""

    name: str
    """Name of the variant, or of the profile."""
    seed: int
    end_s: float
    gpus: int
    nodes: int
    held: Curve
    """Share of the GPUs that jobs held."""
    working: Curve
    """Share of the GPUs on which jobs made progress."""
    waiting: Curve
    startable: Mapping[int, Curve]
    """Size in GPUs → number of further such jobs that could start."""
    room: Mapping[int, int]
    """Size in GPUs → number of such jobs that an empty cell could start."""
    averaged_s: float
    """0, or the width of the bins over which the curves are means."""
    jct_s: Reals
    """Completion times of finished jobs, ascending."""
    queue_s: Reals
    """Waiting times of finished jobs: completion time less run time; ascending."""
    gantt: Gantt
    heat: Heat | None
    """Set where the Gantt chart cannot show everything."""
    jobs: Mapping[int, JobNote]
    """Labels of the bars' jobs."""
    largest_job: float
    waited: bool
    """Whether any job waited at the end of a moment."""
    latencies: Sequence[Latency] = ()
    shapes: Mapping[int, Shape] = field(default_factory=dict)
    """Size of a job → its gang on this cluster's largest nodes."""
    turns: Sequence[tuple[Sharing, Sequence[str]]] = ()
    """The sharings with turns that lasted longest, with the labels of their members."""


@dataclass(slots=True)
class Stopwatch:
    """Collects the placer's latency for each input."""

    seconds: dict[str, "array[float]"] = field(default_factory=dict)

    def note(self, kind: str, took_s: float) -> None:
        self.seconds.setdefault(kind, array("d")).append(took_s)

    def latencies(self) -> Sequence[Latency]:
        """Most frequent input first."""
        found = [
            Latency(kind, len(values), tuple((1e6 * np.quantile(np.asarray(values), QUANTILES)).tolist()))
            for kind, values in self.seconds.items()
        ]
        return sorted(found, key=lambda latency: (-latency.inputs, latency.kind))


def series_of(
    timeline: Timeline, stopwatch: Stopwatch | None = None, max_bars: int = MAX_BARS, name: str = ""
) -> RunSeries:
    """The series of a timeline, which is closed. At least one record. `name`: by default the profile's."""
    timeline.close()
    steps, nodes = timeline.steps, timeline.state.nodes.values()
    at_s, end_s = steps["at_ms"] / 1_000, timeline.now_ms / 1_000
    gpus = np.maximum(1, steps["gpus"])
    there = [len(node.spec.gpus) for node in nodes if node.status is not NodeStatus.GONE]
    done = [job for job in timeline.jobs if job.outcome == "succeeded"]
    gantt = _gantt(timeline, end_s, max_bars)

    def curve(values: Reals) -> Curve:
        return curve_of(at_s, values, end_s)

    startable = {
        size: column
        for size, column in zip(SIZES, steps["startable"].T, strict=True)
        if size <= max(1, sum(there))
    }
    return RunSeries(
        name=name or timeline.state.settings.profile,
        seed=timeline.state.settings.seed,
        end_s=end_s,
        gpus=sum(there),
        nodes=len(there),
        held=curve(steps["held"] / gpus),
        working=curve(steps["working"] / gpus),
        waiting=curve(steps["waiting"]),
        startable={size: curve(column) for size, column in startable.items()},
        room={size: int(max(column, default=0)) for size, column in startable.items()},
        averaged_s=end_s / BINS if len(at_s) > MAX_ROWS else 0.0,
        jct_s=np.sort(np.array([job.jct_ms for job in done], dtype=np.float64)) / 1_000,
        queue_s=np.sort(np.array([job.jct_ms - job.ran_ms for job in done], dtype=np.float64)) / 1_000,
        gantt=gantt,
        heat=_heat(timeline, end_s) if gantt.left_out else None,
        jobs=_notes({int(index): timeline.jobs[index] for index in np.unique(gantt.job)}),
        waited=bool(steps["waiting"].any()),
        largest_job=max((job.gpus for job in timeline.jobs), default=0.0),
        latencies=stopwatch.latencies() if stopwatch is not None else (),
        shapes=timeline.shapes,
        turns=_turns(timeline),
    )


def _notes(jobs: Mapping[int, Job]) -> Mapping[int, JobNote]:
    names = Counter(job.name for job in jobs.values())
    return {
        index: JobNote(
            job.job_id,
            job.model,
            job.gpus,
            job.owner,
            job.name
            if job.name and names[job.name] == 1
            else f"{job.name} {job.job_id[:ID_CHARACTERS]}".strip(),
        )
        for index, job in jobs.items()
    }


def curve_of(at_s: Reals, value: Reals, end_s: float) -> Curve:
    """The curve itself if short enough, else the mean over each of `BINS` equal bins."""
    if not len(at_s):
        return Curve(np.zeros(1), np.zeros(1))
    whole = Curve(np.append(at_s, max(end_s, at_s[-1])), np.append(value, value[-1]))
    return whole if len(at_s) <= MAX_ROWS else smooth(whole, BINS)


def smooth(curve: Curve, bins: int) -> Curve:
    """The mean over each of `bins` equal bins."""
    if len(curve.at_s) <= bins or curve.at_s[-1] <= curve.at_s[0]:
        return curve
    edges = np.linspace(curve.at_s[0], curve.at_s[-1], bins + 1)
    integral = np.concatenate(([0.0], np.cumsum(curve.value[:-1] * np.diff(curve.at_s))))
    means = np.diff(np.interp(edges, curve.at_s, integral)) / np.diff(edges)
    return Curve(edges, np.append(means, means[-1]))


def cdf_of(values: Reals) -> Curve:
    """`values` ascending, at least one → about `CDF_POINTS` points (value, share of values ≤ it)."""
    count = len(values)
    at = np.arange(count) if count <= CDF_POINTS else np.linspace(0, count - 1, CDF_POINTS).astype(np.int64)
    return Curve(np.append(values[at[:1]], values[at]), np.append(0.0, (at + 1) / max(1, count)))


def _turns(timeline: Timeline) -> Sequence[tuple[Sharing, Sequence[str]]]:
    chosen = longest(timeline.sharings.found, timeline.now_ms, MAX_TURNS)
    members = {job_id for sharing in chosen for job_id in sharing.members}
    notes = _notes({index: job for index, job in enumerate(timeline.jobs) if job.job_id in members})
    labels = {note.job_id: note.label for note in notes.values()}
    return [(sharing, [labels[job_id] for job_id in sharing.members]) for sharing in chosen]


# ------------------------------------------------------------------------------------------------ bars


def _gantt(timeline: Timeline, end_s: float, max_bars: int) -> Gantt:
    """All bars if they are few enough; else some nodes, and for these as much time around the busiest moment
    as fits."""
    everything = bars = _merged(timeline.bars)
    nodes = [(node.spec.node_id, len(node.spec.gpus)) for node in timeline.state.nodes.values()]
    shown = _nodes_that_fit(bars, [gpus for _, gpus in nodes], max_bars)
    bars = bars[bars["node"] < shown]
    window_ms = (0.0, 1_000 * end_s)
    if len(bars) > max_bars:
        busiest_ms = timeline.steps["at_ms"][np.argmax(timeline.steps["held"])]
        window_ms = _window(bars, float(busiest_ms), 1_000 * end_s, max_bars)
        bars = bars[_within(bars, *window_ms)]
    return Gantt(
        rows=nodes[:shown],
        job=bars["job"],
        node=bars["node"],
        y=bars["y"] / WHOLE_GPU,
        height=bars["height"] / WHOLE_GPU,
        start_s=bars["start_ms"] / 1_000,
        end_s=bars["end_ms"] / 1_000,
        attempt=bars["attempt"],
        how=bars["how"],
        sharing=bars["sharing"],
        place=bars["place"],
        parts=bars["parts"],
        sharings={
            int(number): timeline.sharings.found[number]
            for number in np.unique(bars["sharing"])
            if number != ALONE
        },
        window_s=(window_ms[0] / 1_000, window_ms[1] / 1_000),
        left_out=len(everything) - len(bars),
    )


def _within(bars: Rows, first_ms: float, last_ms: float) -> NDArray[np.bool_]:
    """Bars that overlap the window."""
    found: NDArray[np.bool_] = (bars["start_ms"] < last_ms) & (bars["end_ms"] > first_ms)
    return found


def _window(bars: Rows, middle_ms: float, end_ms: float, max_bars: int) -> tuple[float, float]:
    """The widest window around a moment with at most `max_bars` bars; by bisection."""
    fits, too_wide = 0.0, end_ms
    for _ in range(HALVINGS):
        half = (fits + too_wide) / 2
        if np.count_nonzero(_within(bars, middle_ms - half, middle_ms + half)) <= max_bars:
            fits = half
        else:
            too_wide = half
    return max(0.0, middle_ms - fits), min(end_ms, middle_ms + fits)


def _nodes_that_fit(bars: Rows, gpus: Sequence[int], max_bars: int) -> int:
    """Number of nodes, from the first on, within `MAX_LANES` GPUs and `max_bars` bars, but with at least
    `MIN_LANES` GPUs."""
    counts = np.cumsum(np.bincount(bars["node"], minlength=len(gpus)))
    lanes = np.cumsum(gpus)
    too_many = (lanes > MAX_LANES) | ((counts > max_bars) & (lanes > MIN_LANES))
    return max(1, int(np.argmax(too_many))) if too_many.any() else len(gpus)


def _merged(bars: Rows) -> Rows:
    """Merges neighbouring GPUs that one job held from and to the same moment into one rectangle."""
    same = ("job", "node", "start_ms", "end_ms", "attempt", "how", "sharing")
    bars = bars[np.lexsort([bars[name] for name in ("y", *reversed(same))])]
    if not len(bars):
        return bars
    new = np.ones(len(bars), dtype=bool)
    new[1:] = bars["y"][1:] != bars["y"][:-1] + bars["height"][:-1]
    for name in same:
        new[1:] |= bars[name][1:] != bars[name][:-1]
    merged = bars[new]
    merged["height"] = np.add.reduceat(bars["height"], np.flatnonzero(new))
    return merged


def _heat(timeline: Timeline, end_s: float) -> Heat:
    """Mean share held per node and bin, by integrating the bars up to each edge."""
    bars, nodes = timeline.bars, list(timeline.state.nodes.values())
    edges = np.linspace(0.0, 1_000 * end_s, HEAT_BINS + 1)
    rate = np.zeros((len(nodes), HEAT_BINS + 2))
    moment = np.zeros_like(rate)
    for name, sign in (("start_ms", 1.0), ("end_ms", -1.0)):
        at = bars[name].astype(np.float64)
        place = (bars["node"], np.searchsorted(edges, at, side="right"))
        np.add.at(rate, place, sign * bars["height"])
        np.add.at(moment, place, sign * bars["height"] * at)
    rate, moment = np.cumsum(rate, axis=1)[:, :-1], np.cumsum(moment, axis=1)[:, :-1]
    held = np.diff(edges * rate - moment, axis=1) / np.diff(edges)
    per_row = -(-len(nodes) // MAX_HEAT_ROWS)
    starts = np.arange(0, len(nodes), per_row)
    capacity = np.add.reduceat(np.array([max(1, len(node.spec.gpus)) for node in nodes]), starts) * WHOLE_GPU
    share = np.add.reduceat(held, starts, axis=0) / capacity[:, None]
    return Heat(
        edges / 1_000,
        np.clip(np.rint(100 * share), 0, 100).astype(np.uint8),
        [nodes[start].spec.node_id for start in starts],
        per_row,
    )
