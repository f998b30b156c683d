"""Performance figures of a run from its ledger: JCT, makespan, queueing delay, GPU allocation, fragmentation.

Times have a resolution of 1 ms. Figures that need the exact job model (utilisation) are absent.
"""

from collections.abc import Mapping

import numpy as np

from penstock.ledger.state.job.job_state import HOLDING
from penstock.simulator.results.metrics import UNFINISHED
from penstock.simulator.results.timeline import Timeline


def figures_of(timeline: Timeline) -> Mapping[str, float | str]:
    """Keys and meanings as in `Figures` of `penstock.simulator.meter`;
    `records` and `ledger_hash` only for a ledger."""
    done = [job for job in timeline.jobs if job.outcome == "succeeded"]
    jcts = sorted(job.jct_ms / 1_000 for job in done)
    waited = sum(job.jct_ms - job.ran_ms for job in done) / 1_000
    count = len(done)
    last_ms = max((job.ended_ms for job in done), default=timeline.now_ms)
    steps, head = timeline.steps[timeline.steps["at_ms"] < last_ms], timeline.replica.head
    passed_s = np.diff(steps["at_ms"], append=last_ms) / 1_000
    idle = (steps["gpus"] - steps["held"]) * (steps["waiting"] > 0)
    capacity_s = float(steps["gpus"] @ passed_s) or 1.0
    return {
        "avg_jct_s": sum(jcts) / count if count else 0.0,
        "p50_jct_s": jcts[count // 2] if count else 0.0,
        "p99_jct_s": jcts[min(count - 1, count * 99 // 100)] if count else 0.0,
        "makespan_s": last_ms / 1_000 if count else 0.0,
        "avg_queue_s": waited / count if count else 0.0,
        "gpu_allocation": float(steps["held"] @ passed_s) / capacity_s,
        "fragmentation": float(idle @ passed_s) / capacity_s,
        "finished_jobs": count,
        "unfinished_jobs": len(timeline.jobs) - count,
        **unfinished(timeline),
        "preemptions": timeline.preemptions,
        **({"records": head.seq, "ledger_hash": head.id} if head.seq else {}),
    }


def unfinished(timeline: Timeline) -> Mapping[str, int]:
    """Key of `UNFINISHED` → number of jobs; their sum is `unfinished_jobs`."""
    found = dict.fromkeys(UNFINISHED, 0)
    for job in timeline.jobs:
        if job.outcome == "succeeded":
            continue
        live = timeline.state.jobs.get(job.job_id)
        state = job.outcome or ("running" if live is not None and live.status in HOLDING else "waiting")
        found["timed_out_jobs" if state.startswith("timed_out") else f"{state}_jobs"] += 1
    return found
