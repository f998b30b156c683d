"""Whether an open batch window slows the placer down: one input after the other, in ms of the processor, with a window open and without. `python -m tests.bench.window`.

A cell with hundreds of running jobs, and a burst that waits for its plan; the same cell without windows, where the burst has started at once. Then jobs end, others come and
start, as on any day. Each input is timed from the event to the bytes of its ledger record.
"""

import gc
from time import process_time
from typing import NamedTuple

import numpy as np

from penstock.model.estimates import JobEstimated
from penstock.model.external_events import JobSubmitted, NodeJoined, TaskExited, TaskStarted
from penstock.model.ledger_events import TermStarted
from penstock.model.settings import PlacerSettings
from penstock_services.placer.core.recorder import Recorder
from tests.support.driver import estimate, job_spec, node_spec

NODES, GPUS = 128, 8
RUNNING, BURST = 400, 200
WINDOW_MS, APART_MS = 600_000, 700_000
ARRIVALS = 8


class Inputs(NamedTuple):
    """ms of the processor for one input."""

    p50_ms: float
    p99_ms: float
    in_window: bool


def _cell(window_ms: int) -> tuple[Recorder, int]:
    """And the ledger's time."""
    cell = Recorder(lambda value: None)
    settings = PlacerSettings(profile="liquid", batch_window_ms=window_ms, batch_arrivals=ARRIVALS)
    cell.record(TermStarted(term=1, placer_id="p", settings=settings), 1)
    for number in range(NODES):
        cell.record(NodeJoined(node=node_spec(f"node-{number:04}", GPUS, cores=64)), 1)
    now_ms = 1
    for number in range(RUNNING):
        now_ms += APART_MS
        _submit(cell, f"old-{number}", now_ms)
        _start(cell, f"old-{number}", now_ms)
    now_ms += APART_MS
    for number in range(BURST):
        _submit(cell, f"burst-{number}", now_ms)
    return cell, now_ms


def _submit(cell: Recorder, job_id: str, now_ms: int) -> None:
    cell.record(JobSubmitted(job_id=job_id, spec=job_spec()), now_ms)
    cell.record(JobEstimated(job_id=job_id, estimate=estimate(1)), now_ms)


def _start(cell: Recorder, job_id: str, now_ms: int) -> None:
    job = cell.state.jobs[job_id]
    for task_id, task in job.tasks.items():
        started = TaskStarted(
            node_id=task.place.node_id, task_id=task_id, token=job.token, pid=7, started_ms=now_ms
        )
        cell.record(started, now_ms)


def measure(*, window: bool) -> Inputs:
    """Half of the old jobs end, and as many come: in a window they join the burst."""
    cell, now_ms = _cell(WINDOW_MS if window else 0)
    took_ms: list[float] = []
    gc.collect()
    gc.disable()
    for number in range(RUNNING // 2):
        job = cell.state.jobs[f"old-{number}"]
        [(task_id, task)] = job.tasks.items()
        exited = TaskExited(
            node_id=task.place.node_id, task_id=task_id, token=job.token, cause="exited", exit_code=0,
            started_ms=now_ms, exited_ms=now_ms,
        )  # fmt: skip
        for event in (
            exited,
            JobSubmitted(job_id=f"new-{number}", spec=job_spec()),
            JobEstimated(job_id=f"new-{number}", estimate=estimate(1)),
        ):
            began_s = process_time()
            cell.record(event, now_ms)
            took_ms.append((process_time() - began_s) * 1_000)
    gc.enable()
    p50_ms, p99_ms = np.quantile(took_ms, (0.5, 0.99)).tolist()
    return Inputs(p50_ms, p99_ms, cell.state.in_window)


def main() -> None:
    without, within = measure(window=False), measure(window=True)
    assert within.in_window
    print(f"without a window: p50 {without.p50_ms:.3f} ms, p99 {without.p99_ms:.3f} ms")
    print(f"while one is open: p50 {within.p50_ms:.3f} ms, p99 {within.p99_ms:.3f} ms")
    print(f"p99 with a window as a multiple of that without: {within.p99_ms / without.p99_ms:.2f}")


if __name__ == "__main__":
    main()
