"""Metrics of a run: label, unit, meaning, whether lower or higher is better; number formats."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.text.spans import MINUTE_S, span

Better = Literal["low", "high", ""]


class Metric(NamedTuple):
    """Description of a metric. `better`: empty if neither direction is."""

    label: str
    unit: str
    """`s`, `share` (of one, shown in %), `count`, `per job`, `GPU h`, `per second` or empty for text."""
    better: Better
    means: str


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "avg_jct_s": Metric(
            "Mean completion time",
            "s",
            "low",
            "From a job's submission to its end (JCT), mean over finished jobs.",
        ),
        "p50_jct_s": Metric("Median completion time", "s", "low", "Half of the finished jobs took less."),
        "p99_jct_s": Metric(
            "99th percentile of it",
            "s",
            "low",
            "One finished job in a hundred took longer.",
        ),
        "makespan_s": Metric("Makespan", "s", "low", "From the start of the trace to its last end."),
        "avg_queue_s": Metric(
            "Mean waiting time",
            "s",
            "low",
            "Completion time less the time in which the job ran: queue, starts, stops.",
        ),
        "gpu_utilisation": Metric(
            "GPU utilisation",
            "share",
            "high",
            "Work of the finished jobs, at the speed they have alone, over all GPUs until the last end.",
        ),
        "gpu_allocation": Metric(
            "GPU allocation",
            "share",
            "",
            "GPU time that jobs held, over all GPUs until the last end.",
        ),
        "fragmentation": Metric(
            "Free while jobs waited",
            "share",
            "low",
            "GPU time that was free although some job waited, over all GPUs.",
        ),
        "full_load_allocation": Metric(
            "Allocation at full load",
            "share",
            "high",
            "GPUs in use when the jobs so far asked for 100 % of them; where jobs fill a cluster and never "
            "end.",
        ),
        "finished_jobs": Metric("Finished jobs", "count", "high", "Jobs whose work was done."),
        "unfinished_jobs": Metric("Unfinished jobs", "count", "low", "Jobs that had come and were not done."),
        "failed_jobs": Metric("of these, failed", "count", "", "Their last attempt ended with an error."),
        "cancelled_jobs": Metric("of these, cancelled", "count", "", "Users or operators cancelled them."),
        "timed_out_jobs": Metric(
            "of these, timed out", "count", "", "They waited or ran longer than they may."
        ),
        "unschedulable_jobs": Metric("of these, too large", "count", "", "No node could ever hold them."),
        "running_jobs": Metric(
            "of these, still running", "count", "", "They held GPUs when the ledger ended."
        ),
        "waiting_jobs": Metric("of these, still waiting", "count", "", "They waited when the ledger ended."),
        "preemptions": Metric("Preemptions", "count", "", "How often a running job had to give way."),
        "restarts_per_job": Metric(
            "Restarts per job",
            "per job",
            "low",
            "Starts after its first, mean over the jobs that have started.",
        ),
        "save_gpu_h": Metric(
            "Lost to saving",
            "GPU h",
            "low",
            "GPU time in which jobs saved because they were stopped or ordered to.",
        ),
        "launch_gpu_h": Metric(
            "Lost to launching again",
            "GPU h",
            "low",
            "GPU time in which jobs that had run before launched again.",
        ),
        "lost_gpu_h": Metric(
            "Work done twice",
            "GPU h",
            "low",
            "Work since the last checkpoint of jobs that were killed, at their speed alone.",
        ),
        "events": Metric("Events", "count", "", "Arrivals and completions."),
        "events_per_s": Metric(
            "Speed of the simulation",
            "per second",
            "",
            "Events per second of processor time, on one core.",
        ),
        "records": Metric("Ledger records", "count", "", "One for each input of the placer."),
        "cpu_s": Metric("Processor time", "s", "", "That the simulation took."),
        "wall_s": Metric("Time taken", "s", "", "Real time that the simulation took."),
        "ledger_hash": Metric("Ledger hash", "", "", "Id of the ledger's last record; it covers every byte."),
    }
)

UNFINISHED = (
    "failed_jobs",
    "cancelled_jobs",
    "timed_out_jobs",
    "unschedulable_jobs",
    "running_jobs",
    "waiting_jobs",
)
"""Final states of unfinished jobs; for a ledger only."""
RESTARTS = ("restarts_per_job", "save_gpu_h", "launch_gpu_h", "lost_gpu_h")
"""Costs of restarts; shown where they are not 0."""
RATED = tuple(key for key, metric in METRICS.items() if metric.better and metric.unit in ("s", "share"))
"""Metrics by which policies are compared."""


def shown(key: str, value: object) -> str:
    """A figure with its unit, short enough for a table."""
    metric = METRICS.get(key)
    if isinstance(value, str) or value is None or metric is None:
        return str(value)
    assert isinstance(value, int | float)
    if metric.unit == "share":
        return f"{100 * value:.2f} %"
    if metric.unit == "count":
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
    if metric.unit == "per second":
        return f"{value:,.0f} /s"
    if metric.unit == "per job":
        return f"{value:,.2f}"
    if metric.unit == "GPU h":
        return f"{value:,.2f} h"
    return f"{value:,.1f} s" if abs(value) >= 100 else f"{value:,.3f} s"


def spread(key: str, half_width: float) -> str:
    """Half of an interval's width, in the unit of its figure."""
    text = shown(key, half_width).removesuffix(" %").removesuffix(" s").removesuffix(" /s").removesuffix(" h")
    return f"± {text}" if text.strip("0.") else f"± < {text[:-1]}1"


def says_something(key: str, *, finished: bool) -> bool:
    """Whether a figure is meaningful: if no job ends, allocation at full load is, and times are not."""
    if finished:
        return key != "full_load_allocation"
    timed = key.endswith(("jct_s", "_queue_s")) or key in ("makespan_s", "gpu_utilisation", "fragmentation")
    return not timed and key != "finished_jobs"


def duration(seconds: float) -> str:
    """Two units at most: `4.2 s`, `3 min 20 s`, `5 h 3 min`, `12 d 4 h`."""
    return f"{seconds:.3g} s" if seconds < MINUTE_S else span(1_000 * seconds)


class TimeUnit(NamedTuple):
    name: str
    seconds: float


def time_unit(span_s: float) -> TimeUnit:
    """The largest unit of which a span has at least three."""
    for name, seconds in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if span_s >= 3 * seconds:
            return TimeUnit(name, seconds)
    return TimeUnit("seconds", 1.0)
