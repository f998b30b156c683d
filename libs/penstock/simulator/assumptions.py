"""Assumptions of a simulation run as sentences: run times given to policies, restart cost, latencies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from penstock.scheduling.profiles import reads_run_times
from penstock.simulator.engine import Durations, Options
from penstock.simulator.job_models.model import Work
from penstock.simulator.job_models.restarts import RestartingWork
from penstock.simulator.results.metrics import duration
from penstock.simulator.traces.jobs import TraceJob

RUN_TIMES: Mapping[Durations, str] = MappingProxyType(
    {
        "learned": "learned by the estimator from the runs of the same owner, command, model and batch size "
        "that have ended, "
        "and from the steps that running jobs report",
        "known": "known before the start, from the trace, as no service knows them",
        "unknown": "unknown to the policy",
    }
)
LONG_S = 600.0  # from here on in minutes and hours
Asked = Literal["both", "known", "learned", "unknown"]


class Variant(NamedTuple):
    """A profile with the source of its run times. `name`: in tables and charts."""

    name: str
    profile: str
    durations: Durations


def variants_of(profiles: Iterable[str], asked: Asked, *, endless: bool = False) -> Sequence[Variant]:
    """The variants to run; with `both` two for each profile that reads run times, and one for each other,
    without learning.

    `endless`: no job ends.
    """
    found: list[Variant] = []
    for profile in profiles:
        if not reads_run_times(profile) or endless:
            found.append(Variant(profile, profile, "known"))
        elif asked != "both":
            found.append(Variant(profile, profile, asked))
        else:
            found += [Variant(f"{profile} ({way})", profile, way) for way in ("learned", "known")]
    return found


def assumptions(
    variants: Sequence[Variant], options: Options, work: Work, jobs: Sequence[TraceJob], *, endless: bool
) -> Mapping[str, str]:
    """Key → sentence. `endless`: no job ends."""
    if endless:
        return {"run_times": "No job ends.", "restarts": "No job restarts.", "latency": _latency(options)}
    found = {
        "run_times": _run_times(variants),
        "restarts": _restarts(work, options, jobs),
        "latency": _latency(options),
    }
    if options.profile_noise:
        error = f"{options.profile_noise:.0%}"
        found["stage_times"] = (
            f"Stage times that policies are given are up to {error} too large or too small."
        )
    return found


LABELS: Mapping[str, str] = MappingProxyType(
    {
        "times": "Times",
        "decided_by": "Decided by",
        "run_times": "Run times",
        "restarts": "Restarts",
        "latency": "Latency",
        "stage_times": "Stage times",
    }
)


def _run_times(variants: Sequence[Variant]) -> str:
    """The policies by source of their run times; policies that do not read them are listed apart."""
    ways: dict[str, list[str]] = {}
    for one in variants:
        way = RUN_TIMES[one.durations] if reads_run_times(one.profile) else "not read"
        ways.setdefault(way, []).append(one.name)
    texts = [f"{' and '.join(_listed(names))}: {way}" for way, names in ways.items()]
    return "; ".join(texts) + "."


def _listed(names: Sequence[str]) -> Sequence[str]:
    return [", ".join(names[:-1]), names[-1]] if len(names) > 1 else names


def _restarts(work: Work, options: Options, jobs: Sequence[TraceJob]) -> str:
    launch, save = _range(work.start_up_s, jobs), _range(work.save_s, jobs)
    if isinstance(work, RestartingWork):
        return f"{_charged(work, options, jobs)}{f' Each start costs {launch}.' if launch else ''}"
    after = "a job that is stopped goes on where it was"
    if not launch and not save:
        return f"Free: a job starts in no time, and {after}."
    costs = [f"each start costs {launch}" if launch else "", f"each end {save} for saving" if save else ""]
    return f"{', '.join(cost for cost in costs if cost)}; {after}.".replace("each", "Each", 1)


def _charged(work: RestartingWork, options: Options, jobs: Sequence[TraceJob]) -> str:
    save = _range(lambda job: work.restart_cost(job).save_s, jobs) or "no time"
    launch = _range(lambda job: work.restart_cost(job).launch_s, jobs) or "no time"
    interval = _range(lambda job: work.restart_cost(job).interval_s, jobs)
    own = "no other checkpoint"
    if interval:
        own = f"checkpoints of its own, as far apart as {interval}, which its run time holds already"
    return (
        f"A job that is stopped saves for {save} and goes on where it was, after {launch} for launching; it "
        f"has {own}, and goes back to the last one where it is killed before it has saved, "
        f"{options.grace_ms / 1_000:g} s after SIGTERM."
    )


def _range(seconds: Callable[[TraceJob], float], jobs: Sequence[TraceJob]) -> str:
    """`18 s`, `20 – 35 s`, `30 min`; empty: 0 s."""
    found = [seconds(job) for job in jobs]
    low, high = min(found, default=0.0), max(found, default=0.0)
    if not high:
        return ""
    if high >= LONG_S:
        return duration(high) if low == high else f"{duration(low)} – {duration(high)}"
    return f"{low:.3g} s" if low == high else f"{low:.3g} – {high:.3g} s"


def _latency(options: Options) -> str:
    text = "The placer decides in no time"
    if options.tick_s:
        text = f"The placer reads its inputs every {options.tick_s:g} s"
    if options.estimator_s is None:
        text += "; the estimator answers as fast as it did here"
    elif options.estimator_s:
        text += f"; the estimator answers after {options.estimator_s:g} s"
    if options.planning_s is None:
        text += "; the batcher plans as fast as it did here"
    elif options.planning_s:
        text += f"; the batcher plans for {options.planning_s:g} s"
    start_s, stop_s = options.latency
    if not (start_s or stop_s):
        return f"{text}; a task starts with its order, and ends with its SIGTERM."
    return f"{text}; a task starts {start_s:g} s after its order, and ends {stop_s:g} s after SIGTERM."
