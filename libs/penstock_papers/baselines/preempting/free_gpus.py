"""Counts of free GPUs per kind of node, for plans that select the jobs that run before they assign nodes.

GPUs of jobs that are being stopped count as free. Such a count ignores how free GPUs are spread over nodes,
and cores and memory: a plan made with it is tried on the nodes before any job is stopped
(`penstock.cluster.view`).
"""

from typing import NamedTuple

from penstock.cluster.view import living_places
from penstock.ledger.derived.groups import frees_gpus
from penstock.ledger.derived.succession import successors
from penstock.ledger.state.job.demand import DemandKey
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.allowed import models_of
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.types import WHOLE_GPU

MAX_NEEDS = 1 << 12  # cached demands


class Need(NamedTuple):
    """GPU requirement of a demand."""

    milli: int
    """Thousandths of GPUs of all workers."""
    suited: tuple[int, ...]
    """Kinds of nodes that suit the demand."""
    part: bool
    """Whether each worker takes a part of a GPU."""
    alike: tuple[object, ...]
    """Equal for needs that differ only in `milli`."""


class GpuKinds:
    """Kinds of placeable nodes, by their GPUs, and the requirements of demands in these terms."""

    def __init__(self, state: CellState) -> None:
        index = state.index
        self.state = state
        self._made_for = index.placeable, state.capacity_version
        kinds: dict[tuple[str, int], int] = {}
        for shape, nodes in index.shape.items():
            kind = shape.gpu_model, shape.gpu_memory_mib
            if shape.gpus and nodes & index.placeable:
                kinds[kind] = kinds.get(kind, 0) | nodes & index.placeable
        by_first_node = sorted(kinds.items(), key=lambda kind: kind[1] & -kind[1])
        self._kinds = [kind for kind, _ in by_first_node]
        self.nodes = [nodes for _, nodes in by_first_node]
        """Kind → its nodes. Ordered by the nodes, since the index's own order differs after a snapshot."""
        self._needs: dict[DemandKey, Need] = {}

    def current(self, state: CellState) -> bool:
        """Whether the nodes are still those from which this was built."""
        return state is self.state and self._made_for == (state.index.placeable, state.capacity_version)

    def need(self, key: DemandKey, job: JobState) -> Need:
        """Requirement of a job of this demand."""
        found = self._needs.get(key)
        if found is None:
            if len(self._needs) == MAX_NEEDS:
                self._needs.clear()
            demand = job.demand
            need, models = demand.worker, models_of(demand.where)
            suited = tuple(
                kind
                for kind, (model, memory_mib) in enumerate(self._kinds)
                if memory_mib >= need.gpu_memory_mib and allows(models, model)
            )
            wanted = demand.workers * need.gpus * need.gpu_share_milli
            part = need.gpu_share_milli < WHOLE_GPU
            found = self._needs[key] = Need(wanted, suited, part, (suited, part))
        return found


class FreeGpus:
    """Free thousandths of GPUs on placeable nodes."""

    def __init__(self, kinds: GpuKinds) -> None:
        state, index = kinds.state, kinds.state.index
        self._state = state
        self._kinds = kinds.nodes
        self._free = [0] * len(self._kinds)
        for (used, total), nodes in index.load.items():
            if total > used:
                for number, those in enumerate(self._kinds):
                    self._free[number] += (total - used) * WHOLE_GPU * (nodes & those).bit_count()
        self._rests = sum(share.milli * nodes.bit_count() for share, nodes in index.shared.items())
        """Free parts of partly allocated GPUs; only for jobs that take parts."""
        self._holds: dict[int, list[tuple[int, int]]] = {}
        for job in state.stopping.values():
            self.give_back(job)

    def take(self, need: Need) -> bool:
        """Takes GPUs for a job that holds none; False where too few are free. A job without GPUs takes
        none."""
        wanted, suited, part, _ = need
        if not wanted:
            return True
        if part and wanted <= self._rests:
            self._rests -= wanted
            return True
        free = self._free
        if len(suited) == 1:
            [kind] = suited
            if free[kind] < wanted:
                return False
            free[kind] -= wanted
            return True
        if sum(free[kind] for kind in suited) < wanted:
            return False
        for kind in suited:
            taken = min(wanted, free[kind])
            free[kind] -= taken
            wanted -= taken
        return True

    def lack(self, need: Need) -> int:
        """Missing thousandths after `take` has returned False."""
        return need.milli - sum(self._free[kind] for kind in need.suited)

    def brings(self, holder: JobState, need: Need) -> int:
        """Thousandths that the holder has on suitable nodes."""
        return sum(milli for kind, milli in self._held(holder) if kind in need.suited)

    def give_back(self, holder: JobState) -> None:
        """Counts what the job holds as free."""
        for kind, milli in self._held(holder):
            self._free[kind] += milli

    def take_again(self, holder: JobState) -> bool:
        """Undoes `give_back`; False where other jobs have taken it."""
        held = self._held(holder)
        for number, (kind, milli) in enumerate(held):
            self._free[kind] -= milli
            if self._free[kind] < 0:
                for taken, back in held[: number + 1]:
                    self._free[taken] += back
                return False
        return True

    def _held(self, holder: JobState) -> list[tuple[int, int]]:
        """(kind, thousandths of GPUs) of each of its tasks on placeable nodes, without GPUs reserved for its
        move or for its successors."""
        held = self._holds.get(holder.order)
        if held is None and not frees_gpus(self._state, holder):
            held = self._holds[holder.order] = []
        elif held is None:
            nodes = self._state.nodes
            stay = {(place.node_id, gpu) for place in holder.target for gpu in place.gpus}
            for place in living_places(holder):
                for later in successors(self._state, holder, place):
                    stay.update((later.node_id, gpu) for gpu in later.gpus)
            held = self._holds[holder.order] = [
                (kind, sum((place.node_id, gpu) not in stay for gpu in place.gpus) * place.gpu_share_milli)
                for place in living_places(holder)
                if place.gpus
                for kind, those in enumerate(self._kinds)
                if those & nodes[place.node_id].bit
            ]
        return held
