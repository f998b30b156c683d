"""Cache of verdicts on waiting units of plans, by the nodes and jobs on which they depend: an unchanged unit
is not tried again.

While many jobs are being stopped each exit would try every waiting unit, though it frees capacity on one node
only. A unit's verdict depends on its jobs, on its nodes and the tasks there, and on the units with which it
has nodes in common, directly or through others.
"""

from collections.abc import Collection, Sequence

from penstock.ledger.state.state import CellState
from penstock.model.decisions.plans import PlanUnit
from penstock.scheduling.order.job_rows import Changes

Together = Sequence[PlanUnit]
"""The jobs of one unit."""


class StillWaiting:
    """Of one decider. It only saves work: units that are tried again get the same verdict."""

    def __init__(self) -> None:
        self._changes = Changes()
        self._waited: dict[str, Together] = {}
        """First job → units that waited at the last trial."""
        self._node_versions: dict[str, int] = {}
        self._stopping: dict[int, int] = {}
        """Order → version of jobs that are being stopped:
        a start that is reported late changes nothing else."""

    def units(self, state: CellState, units: Sequence[Together]) -> Collection[int]:
        """Numbers of the units for which nothing has changed. O(waiting units · their nodes + changes)."""
        jobs, anew = self._changes.ids(state)
        before = self._stopping
        self._stopping = {order: job.version for order, job in state.stopping.items()}
        if anew or state.moving or bool(before) is not bool(self._stopping):
            self._waited = {}
        left = dict(enumerate(units))
        nodes_of = [{node_id for unit in together for node_id in unit.nodes} for together in units]
        changed_nodes = self._changed_nodes(state, set[str]().union(*nodes_of))
        changed_jobs = set(jobs)
        for job_id in jobs:
            if (job := state.jobs.get(job_id)) is not None and job.tasks:
                changed_nodes.update([task.place.node_id for task in job.tasks.values()])
        for order, version in self._stopping.items():
            if before.get(order) != version:
                changed_nodes.update([task.place.node_id for task in state.stopping[order].tasks.values()])
        anew_now = [
            number for number, together in left.items() if self._validated_anew(state, together, changed_jobs)
        ]
        while True:
            for number in anew_now:
                del left[number]
                changed_nodes |= nodes_of[number]
            anew_now = [number for number in left if not changed_nodes.isdisjoint(nodes_of[number])]
            if not anew_now:
                return left

    def _changed_nodes(self, state: CellState, nodes: Collection[str]) -> set[str]:
        before = self._node_versions
        self._node_versions = {
            node_id: -1 if (node := state.nodes.get(node_id)) is None else node.version for node_id in nodes
        }
        return {node_id for node_id, version in self._node_versions.items() if before.get(node_id) != version}

    def _validated_anew(self, state: CellState, together: Together, changed_jobs: set[str]) -> bool:
        """For a reason of its own: it is new, has expired, or a job of it has changed."""
        if self._waited.get(together[0].job_id) != together:
            return True
        unit = together[0].proposed
        until_ms = None if unit is None else unit.valid_until_ms
        if until_ms is not None and state.now_ms > until_ms:
            return True
        return not changed_jobs.isdisjoint([unit.job_id for unit in together])

    def waited(self, units: Sequence[Together]) -> None:
        """These wait on; units after the end of a full record do not wait for capacity, and are not named."""
        self._waited = {together[0].job_id: together for together in units}
