"""Performance figures of a run from its ledger: JCT, makespan, queueing delay, GPU allocation, fragmentation.

Times have a resolution of 1 ms. Figures that need the exact job model (utilisation) are absent.
"""

from collections.abc import Mapping

import numpy as np

from penstock.simulator.report.timeline import NEVER, Timeline


def figures_of(timeline: Timeline, ledger_hash: str = "") -> Mapping[str, float | str]:
    """Keys and meanings as `Figures` of `penstock.simulator.meter`. `ledger_hash`: of the last record; empty if records are not known."""
    done = [job for job in timeline.jobs if job.ended_ms != NEVER and job.outcome == "succeeded"]
    jcts = sorted(job.jct_ms / 1_000 for job in done)
    waited = sum(job.jct_ms - job.ran_ms for job in done) / 1_000
    count = len(done)
    steps = timeline.steps
    last_ms = max((job.ended_ms for job in done), default=timeline.now_ms)
    rows = int(np.searchsorted(np.asarray(steps.at_ms), last_ms, side="left"))
    at_ms = np.append(np.asarray(steps.at_ms)[:rows], last_ms)
    passed_s = np.diff(at_ms) / 1_000
    gpus, held = np.asarray(steps.gpus)[:rows], np.asarray(steps.held)[:rows]
    waiting = np.asarray(steps.waiting)[:rows] > 0
    capacity_s = float(gpus @ passed_s) or 1.0
    return {
        "avg_jct_s": sum(jcts) / count if count else 0.0,
        "p50_jct_s": jcts[count // 2] if count else 0.0,
        "p99_jct_s": jcts[min(count - 1, count * 99 // 100)] if count else 0.0,
        "makespan_s": last_ms / 1_000 if count else 0.0,
        "avg_queue_s": waited / count if count else 0.0,
        "gpu_allocation": float(held @ passed_s) / capacity_s,
        "fragmentation": float(((gpus - held) * waiting) @ passed_s) / capacity_s,
        "finished_jobs": count,
        "unfinished_jobs": len(timeline.jobs) - count,
        "preemptions": timeline.preemptions,
        **({"records": timeline.records, "ledger_hash": ledger_hash} if ledger_hash else {}),
    }
