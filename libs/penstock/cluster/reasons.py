"""The closed list of reasons why a node refuses a task and why a job waits, each with a text and a next step;
and refusals of proposals."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from penstock.ledger.state.index import NodeIndex
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.refusals import Refused
from penstock.model.nouns.allowed import Where, models_of
from penstock.model.nouns.gpu_names import allows
from penstock.model.nouns.transitions import NodeStatus
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector


class Reason(StrEnum):
    """Why a job waits. Names are stable: they appear in records and in `why -o json`."""

    ABOUT_TO_START = "about_to_start"
    HELD = "held"
    AWAITING_ESTIMATE = "awaiting_estimate"
    BACKOFF = "backoff"
    CELL_FROZEN = "cell_frozen"
    NO_NODES = "no_nodes"
    OVERTAKE_LIMIT = "overtake_limit"
    BEHIND_IN_QUEUE = "behind_in_queue"
    OUTRANKED = "outranked"
    AWAITING_STOPS = "awaiting_stops"
    NODES_KEPT = "nodes_kept"
    KEPT_FOR_OTHERS = "kept_for_others"
    BATCH_WINDOW = "batch_window"
    POLICY_FAILED = "policy_failed"
    NODES_EXCLUDED = "nodes_excluded"
    NODES_CORDONED = "nodes_cordoned"
    NODES_DISTRUSTED = "nodes_distrusted"
    NODES_SUSPECT = "nodes_suspect"
    GPUS_TOO_FEW = "gpus_too_few"
    GPU_MODEL = "gpu_model"
    GPU_MEMORY = "gpu_memory"
    GPUS_BUSY = "gpus_busy"
    GPUS_FRAGMENTED = "gpus_fragmented"
    CORES = "cores"
    HOST_MEMORY = "host_memory"
    BANDWIDTH = "bandwidth"
    GPU_NEIGHBOURS = "gpu_neighbours"
    GANG_INCOMPLETE = "gang_incomplete"
    NEVER_FITS_NODES = "never_fits_nodes"
    NEVER_FITS_GPUS = "never_fits_gpus"
    NEVER_FITS_GPU_MODEL = "never_fits_gpu_model"
    NEVER_FITS_GPU_MEMORY = "never_fits_gpu_memory"
    NEVER_FITS_CORES = "never_fits_cores"
    NEVER_FITS_HOST_MEMORY = "never_fits_host_memory"
    NEVER_FITS_BANDWIDTH = "never_fits_bandwidth"
    NEVER_FITS_GANG = "never_fits_gang"


class Advice(NamedTuple):
    """What a reason means, and what its reader can do."""

    text: str
    next_step: str


ADVICE: Mapping[Reason, Advice] = MappingProxyType(
    {
        Reason.ABOUT_TO_START: Advice(
            "It fits now and it is its turn.", "Wait a moment; its placement is about to be decided."
        ),
        Reason.HELD: Advice(
            "It is held: it does not start until it is released.", "Release it with `penstock release`."
        ),
        Reason.AWAITING_ESTIMATE: Advice(
            "Its resource needs are still being estimated.",
            "Wait; if this lasts for more than a few seconds, check that the estimator is running (`penstock "
            "doctor`).",
        ),
        Reason.BACKOFF: Advice(
            "Its last attempt failed; it pauses before it queues again.",
            "Wait, or read why the attempt failed with `penstock logs`.",
        ),
        Reason.CELL_FROZEN: Advice(
            "Most nodes vanished at once, so nothing is placed until they return.",
            "Check the network and the nodes; placing resumes when they report again.",
        ),
        Reason.NO_NODES: Advice(
            "The cell has no nodes.", "Start a node-reporter on at least one machine of this cell."
        ),
        Reason.OVERTAKE_LIMIT: Advice(
            "The first job in the queue has been overtaken as often as allowed; all jobs behind it wait.",
            "Wait until the first job in the queue starts (`penstock queue` shows it), or cancel that job.",
        ),
        Reason.BEHIND_IN_QUEUE: Advice(
            "Jobs before it in the queue come first.", "Wait; `penstock queue` shows the jobs ahead."
        ),
        Reason.OUTRANKED: Advice(
            "The profile prefers other jobs, and they need the GPUs.",
            "Wait until one of them ends (`penstock top`), or ask for less: fewer GPUs or a shorter run "
            "rank earlier in most profiles.",
        ),
        Reason.BATCH_WINDOW: Advice(
            "Jobs arrive fast; it waits for a plan that places all of them.",
            "Wait; if no plan comes in time, it is placed alone.",
        ),
        Reason.AWAITING_STOPS: Advice(
            "Lower-ranked jobs are being stopped for it; its nodes are reserved.",
            "Wait until they have stopped; `penstock describe` shows how long they may take.",
        ),
        Reason.NODES_KEPT: Advice(
            "Nodes are reserved for it until the jobs there have ended.",
            "Wait; it starts earlier if it fits elsewhere. Jobs that end in time may run there meanwhile.",
        ),
        Reason.KEPT_FOR_OTHERS: Advice(
            "It would fit, but the nodes are reserved for a job that comes first.",
            "Wait, or tell how long it runs (`iterations` and progress, see `penstock eta`): a job that ends "
            "in time may start there.",
        ),
        Reason.POLICY_FAILED: Advice(
            "The profile's policy raised an exception when it was asked for a place; it is asked again with "
            "growing pauses.",
            "This is a bug: report it with the line above; another profile (PENSTOCK_PROFILE of the placer) "
            "may place the job.",
        ),
        Reason.NODES_EXCLUDED: Advice(
            "The job does not allow these nodes (`nodes`), or they run images alone and it names none.",
            "Wait until an allowed node is free, allow more nodes, or name an image (`container`).",
        ),
        Reason.NODES_CORDONED: Advice(
            "Nodes that could take it are cordoned; no new job is placed there until they are uncordoned.",
            "Ask the operator who cordoned them (`penstock get nodes -o wide` names them), or end it with "
            "`penstock node uncordon`.",
        ),
        Reason.NODES_DISTRUSTED: Advice(
            "Nodes that could take it are suspect: jobs failed there one after another, whoever they "
            "belonged to.",
            "Wait for a probe, which starts there by itself; or look at the node (`penstock doctor` names "
            "it) and use it again with `penstock node uncordon`.",
        ),
        Reason.NODES_SUSPECT: Advice(
            "Nodes that could take it are silent; no new job is placed there until they report again.",
            "Check the silent nodes (`penstock get nodes`).",
        ),
        Reason.GPUS_TOO_FEW: Advice(
            "Nodes have fewer GPUs than one task needs.", "Ask for fewer GPUs per task and more workers."
        ),
        Reason.GPU_MODEL: Advice(
            "Nodes have GPUs of other models than the job allows.", "Allow more GPU models, or wait."
        ),
        Reason.GPU_MEMORY: Advice(
            "Nodes have GPUs with less memory than one task needs.",
            "Reduce the batch size or `gpu_memory_mib`, or wait.",
        ),
        Reason.GPUS_BUSY: Advice(
            "Too few GPUs are free.", "Wait until running jobs end (`penstock top`), or ask for fewer GPUs."
        ),
        Reason.GPUS_FRAGMENTED: Advice(
            "The cell has enough free GPUs, but no single node has as many as one task needs.",
            "Ask for fewer GPUs per task and more workers, or wait.",
        ),
        Reason.CORES: Advice(
            "Nodes with free GPUs have too few free cores.", "Ask for fewer cores per task, or wait."
        ),
        Reason.HOST_MEMORY: Advice(
            "Nodes with free GPUs have too little free memory.", "Ask for less host memory per task, or wait."
        ),
        Reason.BANDWIDTH: Advice(
            "Nodes with free GPUs have too little free network bandwidth.",
            "Ask for less bandwidth per task, or wait.",
        ),
        Reason.GPU_NEIGHBOURS: Advice(
            "Shared GPUs have room for it, but the profile does not place it beside the jobs there.",
            "Wait until one of them ends, or ask for a share yourself (`gpu_share`), which is given wherever "
            "it fits.",
        ),
        Reason.GANG_INCOMPLETE: Advice(
            "Some of its tasks fit now, but not all; a gang starts whole or not at all.",
            "Wait until more is free, or ask for fewer workers.",
        ),
        Reason.NEVER_FITS_NODES: Advice(
            "The job allows no node of this cell (`nodes`), or those run images alone and it names none.",
            "Correct `nodes` (`penstock get nodes -o wide` lists names and labels), name an image "
            "(`container`), or add such a node.",
        ),
        Reason.NEVER_FITS_GPUS: Advice(
            "No node has as many GPUs as one task needs, even when empty.",
            "Ask for fewer GPUs per task and more workers, or add a larger node.",
        ),
        Reason.NEVER_FITS_GPU_MODEL: Advice(
            "No node has enough GPUs of a model that the job allows.",
            "Allow other GPU models, or add a node with one of these.",
        ),
        Reason.NEVER_FITS_GPU_MEMORY: Advice(
            "No allowed GPU has as much memory as one task needs.",
            "Reduce the batch size or `gpu_memory_mib`, or add a node with larger GPUs.",
        ),
        Reason.NEVER_FITS_CORES: Advice(
            "No suitable node has as many cores as one task needs.",
            "Ask for fewer cores per task, or add a larger node.",
        ),
        Reason.NEVER_FITS_HOST_MEMORY: Advice(
            "No suitable node has as much memory as one task needs.",
            "Ask for less host memory per task, or add a larger node.",
        ),
        Reason.NEVER_FITS_BANDWIDTH: Advice(
            "No suitable node has as much network bandwidth as one task needs.",
            "Ask for less bandwidth per task, or add a better connected node.",
        ),
        Reason.NEVER_FITS_GANG: Advice(
            "One task fits, but even the empty cell cannot hold all tasks of the gang at once.",
            "Ask for fewer workers or smaller tasks, or add nodes.",
        ),
    }
)


def refusals(
    index: NodeIndex, need: ResourceVector, where: Where, fitting: int | None = None
) -> dict[Reason, int]:
    """Nodes that refuse the task now, by the first reason that holds; a dozen set operations.

    The sets are disjoint and their union is every node that is not gone, less those where the task fits
    (`fitting`, for a caller that knows them: the search stops once only these are left).
    """
    open_nodes = index.known & ~index.gone
    found: dict[Reason, int] = {}
    for reason, allowed in _allowed(index, need, where):
        refused = open_nodes & ~allowed
        if refused:
            found[reason] = refused
            open_nodes &= allowed
        if open_nodes == fitting:
            break
    return found


def _allowed(index: NodeIndex, need: ResourceVector, where: Where) -> Iterator[tuple[Reason, int]]:
    """(reason, nodes without it). What the job itself excludes, cordons and silence first, then reasons
    that only another node can resolve, then those that waiting can."""
    if where or index.images_only:
        yield Reason.NODES_EXCLUDED, index.within(where)
    yield Reason.NODES_CORDONED, ~index.cordoned
    yield Reason.NODES_DISTRUSTED, ~index.distrusted | index.placeable
    yield Reason.NODES_SUSPECT, index.placeable
    if need.gpus:
        models = models_of(where)
        too_few = wrong_model = too_small = 0
        for shape, nodes in index.shape.items():
            if shape.gpus < need.gpus:
                too_few |= nodes
            elif not allows(models, shape.gpu_model):
                wrong_model |= nodes
            elif shape.gpu_memory_mib < need.gpu_memory_mib:
                too_small |= nodes
        yield Reason.GPUS_TOO_FEW, ~too_few
        yield Reason.GPU_MODEL, ~wrong_model
        yield Reason.GPU_MEMORY, ~too_small
        yield Reason.GPUS_BUSY, index.sharing(need)
    yield Reason.CORES, index.cores.having(need.cores)
    yield Reason.HOST_MEMORY, index.host_memory.having(need.host_memory_mib)
    yield Reason.BANDWIDTH, index.bandwidth.having(need.bandwidth_mbps)


def unusable(state: CellState, node: NodeState, need: ResourceVector, where: Where) -> str:
    """Why no new task may start on the node, whatever is free there; empty: one may."""
    if node.status is not NodeStatus.READY or node.leaving:
        return f"the node is {node.status}"
    if node.cordon is not None:
        return "the node is cordoned"
    if node.distrusted:
        return "the node is suspect, since jobs failed there one after another"
    if not state.index.eligible(need, where) & node.bit:
        if where and not where.allows(node.spec.terms):
            return "the job does not allow the node"
        if not state.index.within(where) & node.bit:
            return "the node runs images alone, and the job cannot run as one"
        return "its GPUs are of another model or have too little memory"
    return ""


def why_not(state: CellState, node: NodeState, need: ResourceVector, where: Where) -> str:
    """What the node, which may be a view's, lacks for this task; empty: the task fits. `NodeIndex.candidates`
    answers the same for all nodes at once, and `refusals` counts the reasons."""
    if wrong := unusable(state, node, need, where):
        return wrong
    if (
        need.gpu_share_milli == WHOLE_GPU
        and node.healthy_gpu_mask.bit_count() >= need.gpus
        and node.free_core_mask.bit_count() >= need.cores
        and node.free_host_memory_mib >= need.host_memory_mib
        and node.free_bandwidth_mbps >= need.bandwidth_mbps
    ):
        return ""  # a shortcut: the following test has the same result
    free = node.free()
    if free.fits(need):
        return ""
    if short := short_of(free.cores, free.host_memory_mib, free.bandwidth_mbps, need):
        return short
    if need.gpu_share_milli < WHOLE_GPU:
        return f"no GPU has {need.gpu_share_milli}/1000 and {need.gpu_memory_mib} MiB left"
    return f"{free.gpus} GPUs are free, {need.gpus} needed"


def short_of(cores: int, memory_mib: int, bandwidth_mbps: int, need: ResourceVector, more: str = "") -> str:
    """Which of these free resources is too little for the task; empty: none is."""
    for what, has, wants in (
        ("cores", cores, need.cores),
        ("MiB of memory", memory_mib, need.host_memory_mib),
        ("Mbit/s", bandwidth_mbps, need.bandwidth_mbps),
    ):
        if has < wants:
            return f"{has} {what} are free, {wants}{more} needed"
    return ""


class Refusal(NamedTuple):
    """The reason, and its text for users."""

    reason: Refused
    detail: str


def frozen(state: CellState) -> Refusal | None:
    """The refusal while the cell is frozen; None: the cell acts on proposals."""
    return Refusal("wrong_state", f"the cell is frozen: {state.frozen}") if state.frozen else None


def unknown(state: CellState, job_id: str) -> Refusal:
    """The refusal for a job that does not exist."""
    outcome = state.ended.get(job_id)
    return Refusal("unknown_job", f"{job_id} {f'has ended: {outcome}' if outcome else 'is unknown'}")
