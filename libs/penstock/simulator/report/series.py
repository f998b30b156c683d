"""Time series and Gantt bars of one run, bounded in size: small enough for charts and to send between processes."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.model.types import WHOLE_GPU
from penstock.simulator.report.occupancy import SIZES
from penstock.simulator.report.timeline import NEVER, Bars, Timeline

Reals = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_ROWS = 1_200  # of a curve with every step; longer ones become means of bins
BINS = 800
MAX_BARS = 4_000  # of a Gantt chart that a browser still draws at once
MIN_LANES, MAX_LANES = (
    64,
    256,
)  # GPUs of a Gantt chart: enough to see how jobs lie, few enough to tell them apart
HALVINGS = 40
MAX_HEAT_ROWS = 160
HEAT_BINS = 320
QUANTILES = (0.5, 0.9, 0.99, 1.0)
CDF_POINTS = 600
MAX_DETAILED = 6  # policies with charts of their own, so that a page stays below its bound


class Curve(NamedTuple):
    """From `at_s[i]` on until the next, `value[i]` holds; the last point repeats the value at the end."""

    at_s: Reals
    value: Reals


class Gantt(NamedTuple):
    """Rectangles, one column per field. `y`, `height` in GPUs: from the first GPU of the node, and how many.

    `rows`: the nodes as (id, its GPUs); `node` counts in them. `window_s`: the part of the time;
    `left_out`: how many bars are not here, because they lie on other nodes or outside the window.
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
    window_s: tuple[float, float]
    left_out: int


class Heat(NamedTuple):
    """Share of each node's GPUs that was held. Shape (rows, bins), 0 … 100. `per_row`: nodes averaged into one row."""

    edges_s: Reals
    percent: NDArray[np.uint8]
    labels: Sequence[str]
    per_row: int


class Latency(NamedTuple):
    """Wall time of the placer's answers to one type of input, µs at `QUANTILES`."""

    kind: str
    inputs: int
    micros: Sequence[float]


class JobNote(NamedTuple):
    """Of the job of a bar."""

    job_id: str
    model: str
    gpus: float


@dataclass(frozen=True, slots=True)
class RunSeries:
    """Everything that charts show of one run. Seconds since the first record."""

    profile: str
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
    """Size in GPUs → how many more such jobs could start."""
    room: Mapping[int, int]
    """Size in GPUs → how many such jobs an empty cell could start."""
    averaged_s: float
    """0, or the width of the bins over which the curves are means."""
    jct_s: Reals
    """Of finished jobs, ascending."""
    queue_s: Reals
    """Of finished jobs: completion time less the time that they ran; ascending."""
    gantt: Gantt
    heat: Heat | None
    """Where the Gantt chart cannot show everything."""
    jobs: Mapping[int, JobNote]
    """Of the bars."""
    largest_job: float
    waited: bool
    """Whether a job was ever found waiting at the end of a moment."""
    latencies: Sequence[Latency] = ()


@dataclass(slots=True)
class Stopwatch:
    """Collects how long the placer took for each input."""

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


def series_of(timeline: Timeline, stopwatch: Stopwatch | None = None, max_bars: int = MAX_BARS) -> RunSeries:
    """Closes the timeline. At least one record."""
    timeline.close()
    steps, end_s = timeline.steps, timeline.now_ms / 1_000
    at_s = np.asarray(steps.at_ms, dtype=np.float64) / 1_000
    gpus = np.maximum(1, np.asarray(steps.gpus, dtype=np.float64))
    binned = len(at_s) > MAX_ROWS

    def curve(values: Any) -> Curve:
        return curve_of(at_s, np.asarray(values, dtype=np.float64), end_s)

    total = timeline.occupancy.gpus
    sizes = [size for size in SIZES if size <= max(1, total)]
    done = [job for job in timeline.jobs if job.ended_ms != NEVER and job.outcome == "succeeded"]
    gantt = _gantt(timeline, end_s, max_bars)
    return RunSeries(
        profile=timeline.profile,
        seed=timeline.seed,
        end_s=end_s,
        gpus=total,
        nodes=sum(node.there for node in timeline.occupancy.nodes),
        held=curve(np.asarray(steps.held) / gpus),
        working=curve(np.asarray(steps.working) / gpus),
        waiting=curve(steps.waiting),
        startable={size: curve(steps.startable[SIZES.index(size)]) for size in sizes},
        room={size: max(steps.startable[SIZES.index(size)], default=0) for size in sizes},
        averaged_s=end_s / BINS if binned else 0.0,
        jct_s=np.sort(np.array([job.jct_ms for job in done], dtype=np.float64)) / 1_000,
        queue_s=np.sort(np.array([job.jct_ms - job.ran_ms for job in done], dtype=np.float64)) / 1_000,
        gantt=gantt,
        heat=_heat(timeline, end_s) if gantt.left_out else None,
        jobs={
            int(index): JobNote(job.job_id, job.model, job.gpus)
            for index in np.unique(gantt.job)
            for job in (timeline.jobs[index],)
        },
        waited=any(steps.waiting),
        largest_job=max((job.gpus for job in timeline.jobs), default=0.0),
        latencies=stopwatch.latencies() if stopwatch is not None else (),
    )


def curve_of(at_s: Reals, value: Reals, end_s: float) -> Curve:
    """As it is if short enough, else the mean over each of `BINS` equal bins."""
    if not len(at_s):
        return Curve(np.zeros(1), np.zeros(1))
    whole = Curve(np.append(at_s, max(end_s, at_s[-1])), np.append(value, value[-1]))
    return whole if len(at_s) <= MAX_ROWS else smooth(whole, BINS)


def smooth(curve: Curve, bins: int) -> Curve:
    """The mean over each of so many equal bins."""
    if len(curve.at_s) <= bins or curve.at_s[-1] <= curve.at_s[0]:
        return curve
    edges = np.linspace(curve.at_s[0], curve.at_s[-1], bins + 1)
    integral = np.concatenate(([0.0], np.cumsum(curve.value[:-1] * np.diff(curve.at_s))))
    means = np.diff(np.interp(edges, curve.at_s, integral)) / np.diff(edges)
    return Curve(edges, np.append(means, means[-1]))


def cdf_of(values: Reals) -> Curve:
    """`values` ascending, at least one → about `CDF_POINTS` points (value, share of jobs that are not above it)."""
    count = len(values)
    at = np.arange(count) if count <= CDF_POINTS else np.linspace(0, count - 1, CDF_POINTS).astype(np.int64)
    return Curve(np.append(values[at[:1]], values[at]), np.append(0.0, (at + 1) / max(1, count)))


# ------------------------------------------------------------------------------------------------ bars


def _columns(bars: Bars) -> dict[str, Integers]:
    names = ("job", "node", "y", "height", "start_ms", "end_ms", "attempt", "how")
    return {name: np.asarray(getattr(bars, name), dtype=np.int64) for name in names}


def _gantt(timeline: Timeline, end_s: float, max_bars: int) -> Gantt:
    """All bars if they are few enough; else some nodes, and of these as much time around the busiest as fits."""
    columns = _merged(_columns(timeline.bars))
    total = len(columns["job"])
    nodes = timeline.occupancy.nodes
    shown = _nodes_that_fit(columns, [node.gpus for node in nodes], max_bars)
    columns = _only(columns, columns["node"] < shown)
    window_ms = (0.0, 1_000 * end_s)
    if len(columns["job"]) > max_bars:
        window_ms = _window(columns, _busiest_ms(timeline), 1_000 * end_s, max_bars)
        columns = _only(columns, _within(columns, *window_ms))
    return Gantt(
        rows=[(node.node_id, node.gpus) for node in nodes[:shown]],
        job=columns["job"],
        node=columns["node"],
        y=columns["y"] / WHOLE_GPU,
        height=columns["height"] / WHOLE_GPU,
        start_s=columns["start_ms"] / 1_000,
        end_s=columns["end_ms"] / 1_000,
        attempt=columns["attempt"],
        how=columns["how"],
        window_s=(window_ms[0] / 1_000, window_ms[1] / 1_000),
        left_out=total - len(columns["job"]),
    )


def _only(columns: dict[str, Integers], mask: NDArray[np.bool_] | Integers) -> dict[str, Integers]:
    return {name: column[mask] for name, column in columns.items()}


def _within(columns: dict[str, Integers], first_ms: float, last_ms: float) -> NDArray[np.bool_]:
    """Bars of which some part lies in the window."""
    return (columns["start_ms"] < last_ms) & (columns["end_ms"] > first_ms)


def _window(
    columns: dict[str, Integers], middle_ms: float, end_ms: float, max_bars: int
) -> tuple[float, float]:
    """The widest window around a moment with at most so many bars; by halving."""
    fits, too_wide = 0.0, end_ms
    for _ in range(HALVINGS):
        half = (fits + too_wide) / 2
        if np.count_nonzero(_within(columns, middle_ms - half, middle_ms + half)) <= max_bars:
            fits = half
        else:
            too_wide = half
    return max(0.0, middle_ms - fits), min(end_ms, middle_ms + fits)


def _busiest_ms(timeline: Timeline) -> float:
    """When the cell first held most."""
    return float(timeline.steps.at_ms[int(np.argmax(np.asarray(timeline.steps.held)))])


def _nodes_that_fit(columns: dict[str, Integers], gpus: Sequence[int], max_bars: int) -> int:
    """How many nodes, first ones first: all that keep within `MAX_LANES` GPUs and `max_bars` bars, but at least those
    of `MIN_LANES` GPUs."""
    counts = np.bincount(columns["node"], minlength=len(gpus))
    lanes = bars = 0
    for node, own in enumerate(gpus):
        lanes += own
        bars += int(counts[node])
        if node and (lanes > MAX_LANES or (bars > max_bars and lanes > MIN_LANES)):
            return node
    return len(gpus)


def _merged(columns: dict[str, Integers]) -> dict[str, Integers]:
    """Neighbouring GPUs that one job held from and to the same moment become one rectangle."""
    same = ("job", "node", "start_ms", "end_ms", "attempt", "how")
    order = np.lexsort((columns["y"], *(columns[name] for name in reversed(same))))
    columns = _only(columns, order)
    if not len(order):
        return columns
    new = np.ones(len(order), dtype=bool)
    new[1:] = columns["y"][1:] != columns["y"][:-1] + columns["height"][:-1]
    for name in same:
        new[1:] |= columns[name][1:] != columns[name][:-1]
    heights = np.add.reduceat(columns["height"], np.flatnonzero(new))
    merged = _only(columns, new)
    merged["height"] = heights
    return merged


def _heat(timeline: Timeline, end_s: float) -> Heat:
    """Mean share held per node and bin, by integrating the bars up to each edge."""
    columns, nodes = _columns(timeline.bars), timeline.occupancy.nodes
    edges = np.linspace(0.0, 1_000 * end_s, HEAT_BINS + 1)
    rate = np.zeros((len(nodes), HEAT_BINS + 2))
    moment = np.zeros_like(rate)
    for name, sign in (("start_ms", 1.0), ("end_ms", -1.0)):
        at = columns[name].astype(np.float64)
        place = (columns["node"], np.searchsorted(edges, at, side="right"))
        np.add.at(rate, place, sign * columns["height"])
        np.add.at(moment, place, sign * columns["height"] * at)
    rate, moment = np.cumsum(rate, axis=1)[:, :-1], np.cumsum(moment, axis=1)[:, :-1]
    held = np.diff(edges * rate - moment, axis=1) / np.diff(edges)
    per_row = -(-len(nodes) // MAX_HEAT_ROWS)
    starts = np.arange(0, len(nodes), per_row)
    capacity = np.add.reduceat(np.array([max(1, node.gpus) for node in nodes]), starts) * WHOLE_GPU
    share = np.add.reduceat(held, starts, axis=0) / capacity[:, None]
    return Heat(
        edges / 1_000,
        np.clip(np.rint(100 * share), 0, 100).astype(np.uint8),
        [nodes[start].node_id for start in starts],
        per_row,
    )
