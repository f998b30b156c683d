"""Checkpoints of simulated programs: saved on their machine's disk, found by later attempts there, fetched by
other machines.

As `checkpoint_folders`, `checkpoint_server` and `checkpoint_fetch` of the node-reporter do it on real disks
and connections.
"""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.clock import wall_ms
from penstock.model.decisions.orders import CheckpointSource, HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import CheckpointFetched
from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import age, covers
from penstock_services.node_reporter.shell.ports import Key
from tests.faults.laboratory.inputs.wire import keys_of

if TYPE_CHECKING:
    from tests.faults.laboratory.machines.machine import Machine, TaskProcess
    from tests.faults.laboratory.machines.process import Process

ITERATIONS_PER_S = 10
LONGEST_SAVE_S = 3.0
PATIENCE_S, PAUSE_S = 15.0, 1.0
LONGEST_FETCH_S = 5.0
CUT_SHORT = 0.1  # of the fetches
FOLDER = "/c"


class Checkpoints:
    """On one machine's disk. A job's newest alone: the SDK removes the one before."""

    def __init__(self, machine: "Machine") -> None:
        self.newest: dict[str, str] = {}
        """Job → name."""
        self.prepared: dict[Key, str] = {}
        """Task that is about to start → where it goes on; empty: at 0."""
        self.handovers: Mapping[str, HandOverCheckpoint] | None = None
        """As the reporter that runs has them. None: none runs."""
        self.discarded: dict[str, Key] = {}
        """Job → the task that succeeded, and took the job's checkpoints with it."""
        self.lost = False
        """The disk was once replaced."""
        self._machine = machine

    def lose(self) -> None:
        self.newest, self.prepared, self.lost = {}, {}, True

    def discard(self, order: StartTask) -> None:
        self.newest.pop(order.job_id, None)
        self.discarded[order.job_id] = order.task_id, order.token

    def save(self, process: "TaskProcess", saves: dict[str, None]) -> None:
        """The program begins to save; it may be killed before it is done. `saves`: of all its attempts."""
        order, machine = process.order, self._machine
        if order.checkpoint is None or order.place.rank:
            return
        passed = int((machine.world.now_s - process.started_s) * ITERATIONS_PER_S)
        iteration = (age(process.resumed)[1] if process.resumed else 0) + passed
        name = f"attempt-{order.attempt}-iteration-{iteration}"

        def done() -> None:
            if machine.processes.get(process.key) is not process:
                return
            self.newest[order.job_id] = name
            saves[name] = None
            machine.world.trace(f"{machine.node_id} has {name} of {order.job_id}")
            line = (
                f'{{"checkpoint": {{"path": "{name}", "iteration": {iteration}, "bytes": 7, "seconds": '
                f"0.5}}}}\n"
            )
            machine.streams[process.key].write(line.encode())

        machine.world.at(machine.world.within(0.1, LONGEST_SAVE_S), done)

    def prepare(self, order: StartTask) -> None:
        """Where the task goes on."""
        found = self.newest.get(order.job_id, "")
        alone = all(peer.node_id == order.node_id for peer in order.peers)
        self.prepared[order.task_id, order.token] = found if alone else ""

    async def fetch(
        self, order: StartTask, source: CheckpointSource, process: "Process"
    ) -> CheckpointFetched:
        """From the machine that has it, if that can be reached."""
        world, began_s = self._machine.world, self._machine.world.now_s
        about = {
            "node_id": order.node_id,
            "task_id": order.task_id,
            "token": order.token,
            "from_node": source.node_id,
        }
        here = self.newest.get(order.job_id, "")
        if not (here and covers(here, order.checkpoint or "")):
            there = self._machine.others()[source.node_id]
            while (problem := self._refused(there, order)) and world.now_s - began_s < PATIENCE_S:
                await asyncio.sleep(PAUSE_S)
                process.step("while it waits for another node")
            if not problem:
                await asyncio.sleep(world.within(0.1, LONGEST_FETCH_S))
                process.step("while it fetches a checkpoint")
                problem = self._refused(there, order) or (
                    "it was cut short" if world.happens(CUT_SHORT) else ""
                )
            if problem:
                return CheckpointFetched(**about, at_ms=wall_ms(), problem=problem)  # type: ignore[arg-type]
            self.newest[order.job_id] = there.checkpoints.newest[order.job_id]
        name = self.newest[order.job_id]
        path, iteration = f"{FOLDER}/{order.job_id}/{name}", age(name)[1]
        found: dict[str, Any] = {**about, "path": path, "iteration": iteration}
        return CheckpointFetched(**found, at_ms=wall_ms())

    def _refused(self, there: "Machine", order: StartTask) -> str:
        """Why the other machine gives nothing; empty: it does."""
        handovers = there.checkpoints.handovers
        if not there.up or handovers is None:
            return f"node {there.node_id} does not answer"
        found = handovers.get(order.job_id)
        if found is None or found.token != order.token:
            return "no order to hand it over was read there yet"
        if found.public_key != keys_of(order.node_id).public_key:
            return "the request is not signed by the right node"
        name = there.checkpoints.newest.get(order.job_id, "")
        return (
            "" if age(order.checkpoint or "") <= age(name) < (order.attempt,) else "it is not here any more"
        )


def awaits_rank_0(order: StartTask, node_id: str, living: Iterable[StartTask]) -> bool:
    """Whether rank 0 of its gang saves for this task, and has not ended as its node sees (decision 133).

    Until then nobody tells the task to stop, and its grace bounds the wait. `living`: tasks on its node.
    """
    if order.checkpoint is None or order.place.rank == 0:
        return False
    if any(peer.rank == 0 and peer.node_id != node_id for peer in order.peers):
        return True
    gang = order.job_id, order.token
    return any((one.job_id, one.token) == gang and one.place.rank == 0 for one in living)
