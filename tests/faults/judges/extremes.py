"""Inputs at the ends of their legal ranges, read by every reader: jobs that run, end with any counters, and tell any
times.

Rule `read`: what a placer writes about them is decodable, and its rows hold in the tables.
"""

import numpy as np
from msgspec.structs import replace

from infra.codegen.examples import EXAMPLES
from penstock.ledger.snapshot import dump
from penstock.model.external_events import TaskExited
from penstock.model.settings import PlacerSettings
from penstock.model.transitions import JobStatus
from penstock.model.types import Usage
from tests.faults.judges.cell_rules import Broken
from tests.support.driver import CellDriver, node_spec
from tests.unit.test_readers_at_extremes import Readers, extreme, inputs, legal, submit, tell, train

STEPS = 30
ENDED = replace(
    next(event for event in EXAMPLES.values() if isinstance(event, TaskExited)),
    usage=Usage(cpu_ms=5, host_memory_mib=5, gpu_memory_mib=5),
)


def _ends(cell: CellDriver, rng: np.random.Generator) -> None:
    """Some running job ends, with counters as no kernel shows them."""
    running = [job for job in cell.state.jobs.values() if job.status is JobStatus.RUNNING]
    if not running:
        return
    job = running[int(rng.integers(len(running)))]
    for task_id, task in list(job.tasks.items()):
        about = {"node_id": task.place.node_id, "task_id": task_id, "token": job.token}
        found = replace(ENDED, cause="exited", exit_code=0, signal=None, exhausted="", **about)
        try:
            event = legal(replace(extreme(TaskExited, found, rng), exit_code=0, **about))
        except ValueError:  # a rule that spans fields
            event = None
        cell.feed(event or found)


def play(seed: int) -> None:
    """Raises `Broken`, and whatever a reader raises."""
    rng = np.random.default_rng((seed, 3))
    cell = CellDriver(PlacerSettings(profile="penstock"))
    cell.join(node_spec("n1", 4), node_spec("n2", 2, memory_mib=1 << 30))
    readers, read, stream = Readers(), 0, inputs(cell, rng)
    for turn in range(STEPS):
        for job in list(cell.state.jobs.values()):
            if job.status is JobStatus.LAUNCHING and not job.after and rng.random() < 0.7:
                train(cell, job)
            elif job.status is JobStatus.RUNNING and rng.random() < 0.5:
                tell(cell, job, rng)
        kind = rng.random()
        if kind < 0.4:
            submit(cell, rng)
        elif kind < 0.7:
            _ends(cell, rng)
        else:
            cell.feed(next(stream))
        cell.at((turn + 1) * int(rng.integers(1, 3)) * 600_000)
        while read < len(cell.values):
            readers.take(cell.values[read], read)
            read += 1
    for reader in (readers.cell, readers.gateway.replica, readers.projection.replica):
        if dump(reader.state) != dump(cell.state):
            raise Broken("read: a reader has another state than the placer")
