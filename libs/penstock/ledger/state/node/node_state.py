"""Folded state of one node: its inventory, free resources and tasks. Mutable; only `evolve` writes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter

from penstock.ledger.state.holds import Cordon
from penstock.ledger.state.index import NOT_PLACEABLE, Free, Share, shape_of
from penstock.ledger.state.masks import full_mask, mask_of
from penstock.ledger.state.node.distrust import Distrust
from penstock.ledger.state.node.suspicion import Suspicion
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector, TaskPlacement


@dataclass(slots=True)
class NodeState:
    """One node. Masks have bit i for the GPU of slot i, or for core i."""

    spec: NodeSpec
    ordinal: int
    status: NodeStatus
    free_gpu_mask: int
    """Wholly free GPUs."""
    free_core_mask: int
    free_host_memory_mib: int
    free_bandwidth_mbps: int
    faulted_gpu_mask: int = 0
    slots: tuple[str, ...] = ()
    """UUID by slot, where slots are not the inventory's indexes: while a task holds a GPU, its slot stays the
    same, whatever index NVML gives the GPU now and whether it is still present."""
    overdrawn_memory_mib: int = 0
    """Host memory that its tasks hold beyond the inventory: it was larger when they were placed."""
    overdrawn_bandwidth_mbps: int = 0
    shared: dict[int, Share] = field(default_factory=dict)
    """GPU → its free part, for each partly allocated GPU."""
    leaving: bool = False
    """Its departure is proven, but the cell is frozen."""
    left_ms: int = 0
    rebooted: bool = False
    """Its latest joining had a new boot id: earlier tasks are dead."""
    incarnation: int = 0
    """Incarnation of its latest joining; see `NodeJoined`."""
    said: int = 0
    """Number of its latest report that counts; 0: it does not count them."""
    epoch: int = 0
    """Epoch of the log in which it last joined; see `LedgerAccepted`."""
    public_key: str | None = None
    """Key of its first joining that named one."""
    replaceable: bool = False
    """Whether an operator or its deletion has proven the machine dead: the next machine that joins under this
    id may have another key."""
    tasks: dict[str, str] = field(default_factory=dict)
    """Task id → job id of every task not proven ended."""
    reserved: set[str] = field(default_factory=set)
    """Ids of jobs for whose moves resources are reserved here (`evolve_moves.taken`)."""
    orphan_tasks: dict[str, int] = field(default_factory=dict)
    """Tasks that it ran at its latest joining, that the cell had given up, and that have not ended: task id →
    token of that joining."""
    cordon: Cordon | None = None
    """The operator's cordon; a new joining does not lift it."""
    commanded_seq: int = 0
    """Record of its latest cordon or uncordon, else of its first joining:
    earlier commands are out of date."""
    leases: bool = False
    """Whether its reporter ends tasks whose lease has run out."""
    suspicion: Suspicion | None = None
    """Set while the node is Suspect."""
    distrust: Distrust | None = None
    """Set while jobs that failed here count against the node or against some of its GPUs."""
    reserved_cores: int = -1
    """Number of its cores that belong to the GPU array (`penstock.ledger.state.arrays`);
    -1: the cell has no arrays."""
    cpu_core_mask: int = 0
    """Cores that jobs without GPUs hold."""
    named: int = 0
    """Number of tasks of living attempts that were placed here, including ended tasks."""
    version: int = 0
    entered: Free = NOT_PLACEABLE
    """The free resources that the index has for this node."""
    gpu_uuids: tuple[str, ...] = ()
    """The UUID of each slot's GPU, which the inventory may no longer have;
    empty for a free slot. See `read_gpus`."""
    gpu_memory_mib: int = 0
    """Memory of its smallest GPU: so much is allocated of each GPU. See `read_gpus`."""

    @property
    def bit(self) -> int:
        return 1 << self.ordinal

    def read_gpus(self) -> None:
        """Computes `gpu_uuids` and `gpu_memory_mib` after a change of the inventory or of the slots; they are
        cached because they are read for every task."""
        self.gpu_memory_mib = shape_of(self.spec).gpu_memory_mib
        self.gpu_uuids = self.slots or tuple(gpu.uuid for gpu in self.spec.gpus)

    @property
    def present_gpu_mask(self) -> int:
        """Slots whose GPU is present in the node now."""
        if not self.slots:
            return full_mask(len(self.spec.gpus))
        have = {gpu.uuid for gpu in self.spec.gpus}
        return mask_of(tuple(slot for slot, uuid in enumerate(self.slots) if uuid in have))

    def gpu_model(self, slot: int) -> str:
        """Model of the slot's GPU; empty where the inventory has that GPU no longer."""
        uuid = self.gpu_uuids[slot]
        return next((gpu.model for gpu in self.spec.gpus if gpu.uuid == uuid), "")

    def slot_of(self, uuid: str) -> int | None:
        """The slot that belongs to this GPU; None if none does."""
        uuids = self.gpu_uuids
        return uuids.index(uuid) if uuid in uuids else None

    @property
    def offered(self) -> Mapping[int, Share]:
        """Free parts of partly allocated GPUs; none where the node cannot prove a task's end."""
        return self.shared if self.spec.shares_gpus else {}

    def room_of_gpu(self, need: ResourceVector) -> Share:
        """What a wholly free GPU offers this task and later ones."""
        if self.spec.shares_gpus:
            return Share(WHOLE_GPU, self.gpu_memory_mib)
        return Share(need.gpu_share_milli, need.gpu_memory_mib)

    def copy(self) -> "NodeState":
        """A copy on which tasks can be placed and taken back without effect on the state."""
        other = NodeState(*_FIELDS(self))
        other.shared = dict(self.shared)
        return other

    @property
    def healthy_gpu_mask(self) -> int:
        """Wholly free GPUs that may be used."""
        if self.distrust is None:  # as of nearly all nodes, which are asked at each change
            return self.free_gpu_mask & ~self.faulted_gpu_mask
        return self.free_gpu_mask & ~self.unusable_gpu_mask

    @property
    def unusable_gpu_mask(self) -> int:
        """GPUs with a fault, and those on which jobs fail, while they take no probe."""
        doubt = self.distrust
        return (
            self.faulted_gpu_mask if doubt is None or doubt.open else self.faulted_gpu_mask | doubt.gpu_mask
        )

    @property
    def distrusted(self) -> bool:
        """Whether nothing new is placed here, since jobs failed here whoever they belonged to."""
        return self.distrust is not None and not self.distrust.gpu_mask and not self.distrust.open

    def left_of(self, gpu: int) -> Share | None:
        """The free part of a GPU without fault; None if nothing is free."""
        if self.healthy_gpu_mask >> gpu & 1:
            return Share(WHOLE_GPU, self.gpu_memory_mib)
        return None if self.unusable_gpu_mask >> gpu & 1 else self.offered.get(gpu)

    def give(self, place: TaskPlacement) -> None:
        """A task takes its place. A GPU that the inventory no longer has offers no free part."""
        for gpu in place.gpus:
            self.free_gpu_mask &= ~(1 << gpu)
            if place.gpu_share_milli < WHOLE_GPU and self.present_gpu_mask >> gpu & 1:
                left = self.shared.get(gpu) or Share(WHOLE_GPU, self.gpu_memory_mib)
                self.shared[gpu] = Share(
                    left.milli - place.gpu_share_milli, left.memory_mib - place.gpu_memory_mib
                )
        self.take_cores(place.cores)
        self.free_host_memory_mib -= place.host_memory_mib
        self.free_bandwidth_mbps -= place.bandwidth_mbps

    def take_back(self, place: TaskPlacement) -> None:
        """The task is proven dead: undoes `give`."""
        if place.gpus:
            self._take_back_gpus(place)
        if place.cores:
            self.take_back_cores(place.cores)
        self.free_host_memory_mib += place.host_memory_mib
        self.free_bandwidth_mbps += place.bandwidth_mbps

    def _take_back_gpus(self, place: TaskPlacement) -> None:
        inventory = self.present_gpu_mask
        if place.gpu_share_milli == WHOLE_GPU:
            self.free_gpu_mask |= mask_of(place.gpus) & inventory
            return
        for gpu in place.gpus:
            left = self.shared.pop(gpu, None)
            if left is None:
                continue
            if left.milli + place.gpu_share_milli == WHOLE_GPU:
                self.free_gpu_mask |= 1 << gpu & inventory
            else:
                self.shared[gpu] = Share(
                    left.milli + place.gpu_share_milli, left.memory_mib + place.gpu_memory_mib
                )

    def take_cores(self, cores: tuple[int, ...]) -> None:
        """Marks these cores as held by a task."""
        self.free_core_mask &= ~mask_of(cores)

    def take_back_cores(self, cores: tuple[int, ...]) -> None:
        """Marks these cores as free, as far as the node still has them."""
        mask = mask_of(cores)
        self.cpu_core_mask &= ~mask
        self.free_core_mask |= mask & full_mask(self.spec.cores)

    @property
    def borrowed_cores(self) -> int:
        """Number of the GPU array's cores that jobs without GPUs hold; negative: number of the CPU array's
        cores that they do not hold."""
        return self.cpu_core_mask.bit_count() + self.reserved_cores - self.spec.cores

    @property
    def placeable(self) -> bool:
        """Whether a new task may be placed here, if it fits."""
        return self.status is NodeStatus.READY and self.cordon is None and not self.distrusted

    def sound_gpus(self) -> int:
        """Number of GPUs without fault, allocated or free; 0 while nothing may be placed on the node."""
        if not self.placeable:
            return 0
        return (self.present_gpu_mask & ~self.unusable_gpu_mask).bit_count()

    def free(self) -> Free:
        """Resources that may be allocated now.
        A node that shrank below what its tasks hold has nothing free."""
        if not self.placeable:
            return NOT_PLACEABLE
        cores = self.free_core_mask.bit_count()
        return Free(
            self.healthy_gpu_mask.bit_count(),
            cores,
            max(0, self.free_host_memory_mib),
            max(0, self.free_bandwidth_mbps),
            tuple(
                sorted(
                    left
                    for gpu, left in self.offered.items()
                    if left.milli and not self.unusable_gpu_mask >> gpu & 1
                )
            )
            if self.shared
            else (),
            -1 if self.reserved_cores < 0 else min(cores, max(0, -self.borrowed_cores)),
        )


_FIELDS = attrgetter(*(known.name for known in fields(NodeState)))  # in the order of its constructor
