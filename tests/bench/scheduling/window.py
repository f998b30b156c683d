"""Whether an open batch window slows the placer down: ends, starts and arrivals, ms of the processor, while
one is open and without. `python -m tests.bench.scheduling.window`.

A cell with hundreds of running jobs, and a burst of 200 that waits for its plan; the same cell without
windows, where the burst has started at once. Each input is timed from the event to the bytes of its ledger
record.

In a window no job is placed one by one, so inputs that place a job at once exist only without one. Judged are
those with the same work in both cells: ends of tasks (in the window with the burst still in the queue, which
must not be tried) and reports of starts. Arrivals only queue in the window; they are reported beside.
"""

import gc
from collections.abc import Mapping, Sequence
from time import process_time
from typing import NamedTuple

import numpy as np

from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, NodeJoined, TaskExited, TaskStarted
from penstock.model.nouns.settings import PlacerSettings
from penstock_services.placer.core.recorder import Recorder
from tests.support.cluster.driver import estimate, job_spec, node_spec

NODES, GPUS = 128, 8
RUNNING, BURST = 600, 200
WINDOW_MS, APART_MS = 600_000, 700_000
ARRIVALS = 8
JUDGED = ("ends", "starts")
REPEATS = 5


class Measured(NamedTuple):
    """Kind of input → its times in ms of the processor, with the state of the cell at the end."""

    took_ms: Mapping[str, list[float]]
    in_window: bool
    waiting: int
    """Jobs in the queue."""


def _cell(window_ms: int) -> tuple[Recorder, int]:
    """Half of its jobs have reported their start; and the ledger's time."""
    cell = Recorder(lambda value: None)
    settings = PlacerSettings(profile="liquid", batch_window_ms=window_ms, batch_arrivals=ARRIVALS)
    cell.record(TermStarted(term=1, placer_id="p", settings=settings), 1)
    for number in range(NODES):
        cell.record(NodeJoined(node=node_spec(f"node-{number:04}", GPUS, cores=64)), 1)
    now_ms = 1
    for number in range(RUNNING):
        now_ms += APART_MS
        _submit(cell, f"old-{number}", now_ms)
        if number < RUNNING // 2:
            cell.record(_started(cell, f"old-{number}", now_ms), now_ms)
    now_ms += APART_MS
    for number in range(BURST):
        _submit(cell, f"burst-{number}", now_ms)
    return cell, now_ms


def _submit(cell: Recorder, job_id: str, now_ms: int) -> None:
    cell.record(JobSubmitted(job_id=job_id, spec=job_spec()), now_ms)
    cell.record(JobEstimated(job_id=job_id, estimate=estimate(1)), now_ms)


def _started(cell: Recorder, job_id: str, now_ms: int) -> TaskStarted:
    job = cell.state.jobs[job_id]
    [(task_id, task)] = job.tasks.items()
    return TaskStarted(node_id=task.place.node_id, task_id=task_id, token=job.token, pid=7, started_ms=now_ms)


def _exited(cell: Recorder, job_id: str, now_ms: int) -> TaskExited:
    job = cell.state.jobs[job_id]
    [(task_id, task)] = job.tasks.items()
    return TaskExited(
        node_id=task.place.node_id,
        task_id=task_id,
        token=job.token,
        cause="exited",
        exit_code=0,
        started_ms=now_ms,
        exited_ms=now_ms,
    )


def measure() -> tuple[Measured, Measured]:
    """Without a window, and while one is open. Half of the old jobs end, the others report their start, and
    as many come: in a window these join the burst.

    Input by input in turn, so that another process slows both.
    """
    cells = [_cell(0), _cell(WINDOW_MS)]
    took_ms: list[dict[str, list[float]]] = [{kind: [] for kind in (*JUDGED, "arrivals")} for _ in cells]
    gc.collect()
    gc.disable()
    for number in range(RUNNING // 2):
        for (cell, now_ms), times in zip(cells, took_ms, strict=True):
            for kind, event in (
                ("ends", _exited(cell, f"old-{number}", now_ms)),
                ("starts", _started(cell, f"old-{RUNNING // 2 + number}", now_ms)),
                ("arrivals", JobSubmitted(job_id=f"new-{number}", spec=job_spec())),
                ("arrivals", JobEstimated(job_id=f"new-{number}", estimate=estimate(1))),
            ):
                began_s = process_time()
                cell.record(event, now_ms)
                times[kind].append((process_time() - began_s) * 1_000)
    gc.enable()
    without, within = (
        Measured(times, cell.state.in_window, len(cell.state.queue))
        for (cell, _), times in zip(cells, took_ms, strict=True)
    )
    return without, within


def p99s_ms(repeats: int = REPEATS) -> Mapping[str, tuple[float, float]]:
    """Kind of input → p99 without a window and while one is open, ms. Every run has the same inputs: of each
    counts its shortest time, so that other processes do not count."""
    runs = [measure() for _ in range(repeats)]
    assert all(within.in_window and not without.in_window for without, within in runs)
    return {kind: (_p99_ms(kind, runs, 0), _p99_ms(kind, runs, 1)) for kind in runs[0][0].took_ms}


def _p99_ms(kind: str, runs: Sequence[tuple[Measured, Measured]], which: int) -> float:
    shortest = np.min([run[which].took_ms[kind] for run in runs], axis=0)
    return float(np.quantile(shortest, 0.99))


def main() -> None:
    for kind, (without_ms, within_ms) in p99s_ms().items():
        print(
            f"{kind:<8} p99 without a window {without_ms:.3f} ms, while one is open {within_ms:.3f} ms, "
            f"{within_ms / without_ms:.2f} times"
        )


if __name__ == "__main__":
    main()
