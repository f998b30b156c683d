"""Orders to nodes: start, stop, checkpoint, cores, bandwidth, probes, and the answer to a joining (LAW 4)."""

import base64
import binascii
import zlib
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.inputs.external_events import Attempt, PublicKey, Token
from penstock.model.jobs.job_parts import Environment
from penstock.model.nouns.nodes import JoinRefusal
from penstock.model.nouns.types import (
    MAX_GPUS_PER_NODE,
    WHOLE_GPU,
    Identifier,
    Milliseconds,
    SecretName,
    Sha256,
    ShortText,
    TaskPlacement,
    Value,
)
from penstock.model.schema.event import Event, event
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic

MAX_COMPANIONS = 2 * MAX_GROUP_MEMBERS  # bound of the wire; a task has fewer than its group has members


class Order(Event, frozen=True, kw_only=True):
    """Base of orders: derived from valid ledger records only (LAW 4). Repeats carry the same token."""

    TOPIC = Topic.ORDERS
    MAX_BYTES = 7 * MAX_EVENT_BYTES  # a submission's worth, and one entry per member of a gang of 512

    token: Token
    """(Epoch, ledger seq) of the decision (`penstock.model.nouns.token`); a node refuses tokens older than
    the highest it has obeyed."""
    node_id: Identifier


class TaskOrder(Order, frozen=True, kw_only=True):
    """Base of orders about one task."""

    task_id: Identifier


@event
class AnswerJoin(Order, frozen=True, kw_only=True):
    """Answer to a joining: read by every machine that uses this node id."""

    TYPE = "penstock.order.answer_join"
    OMITTED = ("public_key", "version")

    boot_id: Identifier
    incarnation: Token
    """Incarnation of the joining that is answered."""
    verdict: Literal["accepted", JoinRefusal]
    machine_id: Identifier | None = None
    """The machine that has the node id now."""
    highest_incarnation: Token
    """Incarnation of the latest accepted joining: the next must be above it."""
    public_key: PublicKey | None = None
    """The key that signed the refused joining, where it is not the node's."""
    version: ShortText = ""
    """Version of Penstock that the placer is of: what it does not know of a newer node's reports it ignores.
    Empty: not reported."""


@event
class ProbeNode(Order, frozen=True, kw_only=True):
    """A suspect node that reads this joins again. If it does not, its lease ends, and then its tasks are
    proven dead."""

    TYPE = "penstock.order.probe_node"

    incarnation: Token
    """Incarnation of the joining that is in doubt; a node that has joined again since has answered."""


class Peer(Value, frozen=True, kw_only=True):
    """Where another member of the gang runs."""

    rank: Annotated[int, Meta(ge=0)]
    role: Literal["ps", "worker"]
    node_id: Identifier
    address: ShortText


class Companion(Value, frozen=True, kw_only=True):
    """A task of the same group that shares whole GPUs with the task to start."""

    task_id: Identifier
    token: Token
    """Token of the order that starts it."""


def pack_peers(peers: tuple[Peer, ...]) -> str:
    """Base64 of the zlib-compressed JSON of the peers: a seventh of its size where nodes are numbered, two
    fifths where their names are random."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(peers))).decode()


def unpack_peers(packed: str) -> tuple[Peer, ...]:
    """Inverse of `pack_peers`; at most `Order.MAX_BYTES` of JSON. Raises `ValueError`."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(base64.b64decode(packed, validate=True), Order.MAX_BYTES)
        if not reader.eof:
            raise ValueError("packed_peers cannot be read: they are cut, or too long")
        return msgspec.json.decode(text, type=tuple[Peer, ...])
    except (binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"packed_peers cannot be read: {error}") from error


class CheckpointSource(Value, frozen=True, kw_only=True):
    """The node that has a checkpoint; its reporter serves it at this address, like its tasks' output."""

    OMITTED = ("tls",)

    node_id: Identifier
    address: ShortText
    port: Annotated[int, Meta(ge=1, le=65_535)]
    tls: bool = False
    public_key: PublicKey
    """Key with which the node signs what it serves."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """Size as the script reported it."""


@event
class HandOverCheckpoint(Order, frozen=True, kw_only=True):
    """Serve the job's newest checkpoint on this node to the node of its next attempt,
    when that requests it."""

    TYPE = "penstock.order.hand_over_checkpoint"

    job_id: Identifier
    attempt: Attempt
    """The attempt that resumes there: checkpoints of earlier attempts may be handed over."""
    to_node: Identifier
    public_key: PublicKey
    """Key of that node, which signs its request."""


@event
class StartTask(TaskOrder, frozen=True, kw_only=True):
    """Start this process with exactly these GPUs, cores and caps."""

    TYPE = "penstock.order.start_task"
    OMITTED = (
        "gpu_uuids",
        "job_gpu_uuids",
        "peers_of",
        "packed_peers",
        "lease_ms",
        "secrets",
        "owner",
        "environment",
        "code",
        "checkpoint",
        "checkpoint_from",
        "global_batch_size",
        "companions",
        "prelaunch",
        "spare_cores",
        "interactive",
        "may_submit",
    )

    job_id: Identifier
    attempt: Attempt
    boot_id: Identifier
    """The order is valid for this boot of the node only."""
    incarnation: Token = 0
    """Incarnation of the joining that the cell knew; a node that has joined again since waits for the
    repeated order. 0: the sender did not know the incarnation; check boot id and token only."""
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, SecretName] = field(default_factory=dict)
    """Variable → name of a secret that the node has for `owner`, or for every tenant."""
    owner: Identifier | None = None
    """Tenant of the job, where it requests secrets or has code."""
    workdir: ShortText | None = None
    environment: Environment | None = None
    """Where its programs come from; None: the node's own PATH."""
    code: Sha256 | None = None
    """Digest of an archive that the node fetches from its gateway for `owner`
    and unpacks into the task's own folder."""
    place: TaskPlacement
    gpu_uuids: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """UUIDs of the GPUs in `place.gpus`, in that order; a node identifies GPUs by these alone."""
    job_gpu_uuids: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """All whole GPUs of the job on this node, in order of their slots, where the job has other tasks there,
    too. Members of a group have the same list. Empty: `gpu_uuids` are all."""
    peers: tuple[Peer, ...]
    """Every member of the gang; empty where `peers_of` names the order that has them."""
    peers_of: Identifier | None = None
    """For a large gang: the task on this node with the order that has the peers, under the same token and
    read before this one. The task itself where `packed_peers` has them, so that a node without support for
    that field refuses the order."""
    packed_peers: Annotated[str, Meta(max_length=4 * MAX_EVENT_BYTES)] | None = None
    """Every member of a large gang, as `pack_peers` writes them."""
    rendezvous_port: Annotated[int, Meta(ge=1_024, le=65_535)]
    grace_ms: Annotated[int, Meta(ge=0)]
    lease_ms: Milliseconds = 0
    """The node ends the task when it has not reached the log for this time. 0: never."""
    checkpoint: ShortText | None = None
    """Name of the checkpoint to resume from, in the job's folder; empty: the ledger has none that every task
    of the gang can read. None: the job has no such folder."""
    checkpoint_from: CheckpointSource | None = None
    """The node from which to fetch the checkpoint first. None: it is on this node or in a shared folder, or
    there is none."""
    global_batch_size: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Samples of all workers together; each worker receives the size of its part."""
    companions: Annotated[tuple[Companion, ...], Meta(max_length=MAX_COMPANIONS)] = ()
    """Tasks of its group on this node: it may start on their GPUs while they are alive,
    and they while it is."""
    prelaunch: bool = False
    """It launches while other tasks hold its GPUs,
    and gets the GPUs at its gate when these are proven dead."""
    spare_cores: bool = False
    """Its job asked for no number of cores: beside `place.cores` it may use cores of the node that no task
    was given, until one is."""
    interactive: bool = False
    """Its program has a terminal."""
    may_submit: bool = False
    """The node gives it the gateway's URL and a token that it signs (`penstock.runtime.keys.job_tokens`)."""

    @property
    def gpu_memory_limit_mib(self) -> int:
        """Memory that it may hold on each of its GPUs from its start on; 0: it has them alone then, or no
        amount was promised."""
        shares = self.companions or self.place.gpu_share_milli < WHOLE_GPU
        return self.place.gpu_memory_mib if shares else 0


@event
class StopTask(TaskOrder, frozen=True, kw_only=True):
    """SIGTERM, `grace_ms`, SIGKILL. A task that has not started is prevented from starting."""

    TYPE = "penstock.order.stop_task"
    OMITTED = ("chief_ended",)
    GIVEN_UP: ClassVar = "the cell has given it up on this node"
    """Reason of the stop of a task that is alive on its node, and ended by the ledger."""

    grace_ms: Annotated[int, Meta(ge=0)]
    reason: ShortText
    chief_ended: bool = False
    """For another rank of a gang that saves by the SDK: rank 0 has ended, or saves nothing. Until then such a
    rank does not get SIGTERM."""


@event
class CheckpointTask(TaskOrder, frozen=True, kw_only=True):
    """Ask the training script to save its state."""

    TYPE = "penstock.order.checkpoint_task"


@event
class SetCores(TaskOrder, frozen=True, kw_only=True):
    """Pin a running task to these cores."""

    TYPE = "penstock.order.set_cores"

    cores: Annotated[tuple[int, ...], Meta(min_length=1)]


@event
class SetBandwidth(TaskOrder, frozen=True, kw_only=True):
    """Cap a running task's memory bandwidth; None lifts the cap."""

    TYPE = "penstock.order.set_bandwidth"

    memory_bandwidth_percent: Annotated[int, Meta(ge=1, le=100)] | None
