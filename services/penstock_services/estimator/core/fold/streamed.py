"""The estimator's fold of the gateway's events, which may begin long after the ledger, with the oldest one
that is still stored.

Then jobs of earlier submissions are left out, and a node that joined earlier is entered when a job is placed
there: its GPUs have no name, and are as many as a node may have. Only facts that estimates need are folded.
"""

from typing import Any

from msgspec.structs import replace

from penstock.ledger.fold.evolve import evolve
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import (
    JobQueued,
    NodeRestored,
    PlacementDecided,
    StopDecided,
)
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    JobSubmitted,
    NodeChanged,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
)
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import MAX_CORES_PER_NODE, MAX_GPUS_PER_NODE
from penstock.model.schema.event import Event
from penstock_services.estimator.core.fold.state import HANDLERS, OF_CELL, State

STATUS = {JobEstimated, JobQueued, StopDecided, NodeSuspected, NodeLeft, NodeRestored}
"""Without these the status of a job or node would be another one than later facts expect."""
NEEDED = {*STATUS, *HANDLERS, *OF_CELL}


class Streamed:
    """Feeds `state`; for `read_events`."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._whole: bool | None = None
        """Whether the first event was of the ledger's first record."""

    @property
    def replica(self) -> Replica:
        return self._state.replica

    def see(self, record: RawRecord, n: int, event: Event) -> None:
        """The replica's hook."""
        if self._whole is None:
            self._whole = record.seq == 1
        if self._whole or (type(event) in NEEDED and self._is_known(event)):
            self._state.see(record, n, event if self._whole else _alone(event))

    def _is_known(self, event: Any) -> bool:
        """Whether the stream has introduced what the event is about."""
        cell, kind = self._state.cell, type(event)
        if kind in (JobSubmitted, JobEstimated):
            return True
        if hasattr(event, "job_id"):
            known = event.job_id in cell.jobs
            if known and kind is PlacementDecided:
                for place in event.tasks:
                    self._enter(place.node_id)
            return known
        if hasattr(event, "task_id"):
            return job_of_task(cell, event.node_id, event.task_id) is not None
        if kind is NodeChanged:
            self._enter(event.node.node_id)
        node_id = getattr(event, "node_id", None)
        return node_id is None or node_id in cell.nodes

    def _enter(self, node_id: str) -> None:
        if node_id not in self._state.cell.nodes:
            gpus = tuple(
                Gpu(index=slot, uuid=f"{node_id}-{slot}", model="", memory_mib=1)
                for slot in range(MAX_GPUS_PER_NODE)
            )
            spec = NodeSpec(
                node_id=node_id, boot_id="", cores=MAX_CORES_PER_NODE, host_memory_mib=1 << 30, gpus=gpus
            )
            evolve(self._state.cell, NodeJoined(node=spec))  # the estimator's own tables know it not


def _alone(event: Event) -> Event:
    """A placement without the jobs and plans that it refers to."""
    return replace(event, group=None, after=(), unit=None) if isinstance(event, PlacementDecided) else event
