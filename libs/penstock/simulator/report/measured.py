"""Provenance of a ledger's figures as sentences: measured or simulated times, deciding policies, known run
times, cost of starts."""

from array import array
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from penstock.scheduling.profiles import reads_run_times
from penstock.simulator.assumptions import RUN_TIMES
from penstock.simulator.cell import PLACER_ID
from penstock.simulator.results.metrics import duration
from penstock.simulator.results.timeline import Term, Timeline
from penstock.text.counting import count


def measured(timeline: Timeline, *, live: bool) -> Mapping[str, str]:
    """Key of `assumptions.LABELS` → sentence. `live`: read from a cell, up to its present; else from a file.

    A file of `simulate --ledger` differs from one of a cell only in the placer's id. With a simulated clock,
    a run time that was known before any job had ended cannot have been learned.
    """
    simulated = any(term.placer_id == PLACER_ID for term in timeline.terms)
    end = "now" if live else "the last record"
    clock = (
        "Simulated: no cell ran these jobs; times are of the simulated clock"
        if simulated
        else "Measured by the placer's clock"
    )
    return {
        "times": f"{clock}, from the first record to {end}.",
        "decided_by": f"{_deciders(timeline.terms)}.",
        "run_times": f"{_run_times(timeline, simulated=simulated)}.",
        "restarts": f"{_restarts(timeline)}.",
    }


def _deciders(terms: Sequence[Term]) -> str:
    """`fifo of penstock 0.1 up to record 40; srtf of penstock 0.1`."""
    runs = [list(found) for _, found in groupby(terms, key=lambda term: (term.profile, term.code_version))]
    parts = [
        run[0].profile + (f" of penstock {run[0].code_version}" if run[0].code_version else "")
        for run in runs
    ]
    ends = [f" up to record {run[0].seq - 1:,}" for run in runs[1:]]
    return "; ".join(part + end for part, end in zip(parts, [*ends, ""], strict=True)) or "not recorded"


def _run_times(timeline: Timeline, *, simulated: bool) -> str:
    profiles = dict.fromkeys(term.profile for term in timeline.terms)
    reading = [profile for profile in profiles if reads_run_times(profile)]
    if not reading:
        return f"{', '.join(profiles)}: not read"
    timed, jobs = sum(job.timed for job in timeline.jobs), len(timeline.jobs)
    if not timed:
        way = RUN_TIMES["unknown"]
    elif not simulated:
        way = f"estimated for {timed:,} of {count(jobs, 'job')}"
    elif timeline.foreseen:
        way = RUN_TIMES["known"]
    else:
        way = f"{RUN_TIMES['learned']}: {timed:,} of {count(jobs, 'job')} had one"
    return f"{', '.join(reading)}: {way}"


def _restarts(timeline: Timeline) -> str:
    if not timeline.starts_ms:
        return "No job has started"
    parts = [
        f"{count(len(timeline.starts_ms), 'start')} took {_spread(timeline.starts_ms)} from placement until "
        "all tasks ran"
    ]
    if timeline.trains_ms:
        parts.append(
            f"{_spread(timeline.trains_ms)} until the training began, of {len(timeline.trains_ms):,} that "
            "reported it"
        )
    if timeline.saves_ms:
        parts.append(f"saving took {_spread(timeline.saves_ms)}")
    if timeline.prelaunches:
        early = f", {_spread(timeline.early_ms)} before" if timeline.early_ms else ""
        parts.append(
            f"{count(timeline.prelaunches, 'attempt')} launched before their GPUs were free{early}, "
            f"{timeline.given_back:,} of them in vain"
        )
    if timeline.core_changes:
        parts.append(f"cores of running tasks changed {timeline.core_changes:,} times")
    if timeline.slowed:
        parts.append(f"{count(timeline.slowed, 'step')} slowed a job beside a training")
    return f"Measured: {'; '.join(parts)}; {count(timeline.preemptions, 'preemption')}"


def _spread(values_ms: "array[int]") -> str:
    """`18 s`; `0.31 s in the median (0.2 s to 4.1 s)`."""
    low, middle, high = (float(value) / 1_000 for value in np.quantile(np.asarray(values_ms), (0, 0.5, 1)))
    if low == high:
        return duration(middle)
    return f"{duration(middle)} in the median ({duration(low)} to {duration(high)})"
