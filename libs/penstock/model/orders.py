"""Orders to nodes: start, stop, checkpoint, cores, bandwidth, probes, and the answer to a joining (LAW 4)."""

import base64
import binascii
import zlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from penstock.model.event import Event, event
from penstock.model.external_events import Attempt, PublicKey, Token
from penstock.model.groups import MAX_GROUP_MEMBERS
from penstock.model.topics import MAX_EVENT_BYTES, Topic
from penstock.model.types import (
    MAX_GPUS_PER_NODE,
    Environment,
    Identifier,
    JoinRefusal,
    Milliseconds,
    SecretName,
    Sha256,
    ShortText,
    TaskPlacement,
    Value,
)

MAX_COMPANIONS = 2 * MAX_GROUP_MEMBERS  # of the wire; beside a task are fewer than its group has members


class Order(Event, frozen=True, kw_only=True):
    """Base of orders: derived from valid ledger records only (LAW 4). Repeats carry the same token."""

    TOPIC = Topic.ORDERS
    MAX_BYTES = 4 * MAX_EVENT_BYTES  # a submission's worth, and one entry per member of a gang of 512

    token: Token
    """(Epoch, ledger seq) of the decision (`penstock.model.token`); a node refuses tokens older than the highest it has obeyed."""
    node_id: Identifier


class TaskOrder(Order, frozen=True, kw_only=True):
    """Base of orders about one task."""

    task_id: Identifier


@event
class AnswerJoin(Order, frozen=True, kw_only=True):
    """What the cell makes of a joining: read by every machine that goes by this node id."""

    TYPE = "penstock.order.answer_join"
    OMITTED = ("public_key",)

    boot_id: Identifier
    incarnation: Token
    """Of the joining that is answered."""
    verdict: Literal["accepted", JoinRefusal]
    machine_id: Identifier | None = None
    """Of the machine that has the node id now."""
    highest_incarnation: Token
    """Of the latest joining that counts: the next must be above it."""
    public_key: PublicKey | None = None
    """Where another key than the node's has signed the joining that is refused: that key."""


@event
class ProbeNode(Order, frozen=True, kw_only=True):
    """A suspect node that reads this joins again. If it does not, its lease ends, and then its tasks are proven dead."""

    TYPE = "penstock.order.probe_node"

    incarnation: Token
    """Of the joining that is in doubt; a node that has joined again since has answered."""


class Peer(Value, frozen=True, kw_only=True):
    """Where another member of the gang runs."""

    rank: Annotated[int, Meta(ge=0)]
    role: Literal["ps", "worker"]
    node_id: Identifier
    address: ShortText


class Companion(Value, frozen=True, kw_only=True):
    """A task with which another one shares its GPUs, whole: both are of one group."""

    task_id: Identifier
    token: Token
    """Of the order that starts it."""


def pack_peers(peers: tuple[Peer, ...]) -> str:
    """Base64 of zlib of their JSON: a seventh of it where nodes are numbered, two fifths where their names are random."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(peers))).decode()


def unpack_peers(packed: str) -> tuple[Peer, ...]:
    """The inverse; at most `Order.MAX_BYTES` of JSON. Raises `ValueError`."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(base64.b64decode(packed, validate=True), Order.MAX_BYTES)
        if not reader.eof:
            raise ValueError("packed_peers cannot be read: they are cut, or too long")
        return msgspec.json.decode(text, type=tuple[Peer, ...])
    except (binascii.Error, zlib.error, msgspec.DecodeError) as error:
        raise ValueError(f"packed_peers cannot be read: {error}") from error


class CheckpointSource(Value, frozen=True, kw_only=True):
    """The node that has a checkpoint; its reporter serves it at its address, as it does its tasks' output."""

    OMITTED = ("tls",)

    node_id: Identifier
    address: ShortText
    port: Annotated[int, Meta(ge=1, le=65_535)]
    tls: bool = False
    public_key: PublicKey
    """It signs what it serves."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 60)] = 0
    """As the script reported it."""


@event
class HandOverCheckpoint(Order, frozen=True, kw_only=True):
    """Give the job's newest checkpoint here to the node where its next attempt is placed, when that asks for it."""

    TYPE = "penstock.order.hand_over_checkpoint"

    job_id: Identifier
    attempt: Attempt
    """That goes on there: what was saved by attempts before it may be handed over."""
    to_node: Identifier
    public_key: PublicKey
    """Of that node, which signs its request."""


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
    )

    job_id: Identifier
    attempt: Attempt
    boot_id: Identifier
    """For this boot of the node only."""
    incarnation: Token = 0
    """Of the joining that the cell knew; a node that has joined again since leaves it to the repeat. 0: not known."""
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, SecretName] = field(default_factory=dict)
    """Variable → name of a secret that the node has for `owner`, or for every tenant."""
    owner: Identifier | None = None
    """The job's tenant, where it asks for secrets or has code."""
    workdir: ShortText | None = None
    environment: Environment | None = None
    """Where its programs come from; None: the node's own PATH."""
    code: Sha256 | None = None
    """Of an archive that the node fetches from its gateway for `owner` and unpacks into the task's own folder."""
    place: TaskPlacement
    gpu_uuids: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """Names the GPUs of `place.gpus`, in that order; a node obeys no other name of a GPU."""
    job_gpu_uuids: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_GPUS_PER_NODE)] = ()
    """All whole GPUs of the job on this node, in order of their slots, where other tasks of it are there, too. Members of a group have the same.
    Empty: `gpu_uuids` are all."""
    peers: tuple[Peer, ...]
    """Every member of the gang; empty where `peers_of` names the order that has them."""
    peers_of: Identifier | None = None
    """Of a large gang: the task on this node whose order, under the same token and read before this one, has the peers. The
    task itself where `packed_peers` has them, so that a node that does not know that field refuses the order."""
    packed_peers: Annotated[str, Meta(max_length=4 * MAX_EVENT_BYTES)] | None = None
    """Every member of a large gang, as `pack_peers` writes them."""
    rendezvous_port: Annotated[int, Meta(ge=1_024, le=65_535)]
    grace_ms: Annotated[int, Meta(ge=0)]
    lease_ms: Milliseconds = 0
    """The node ends the task when it has not reached the log for so long. 0: never."""
    checkpoint: ShortText | None = None
    """The name of the checkpoint to go on at, in the job's folder; empty: the ledger knows none that every task of the gang finds. None:
    the job has no such folder."""
    checkpoint_from: CheckpointSource | None = None
    """Where to fetch it first. None: it is here, in a shared folder, or nowhere."""
    global_batch_size: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Samples of all workers together; each is told its part."""
    companions: Annotated[tuple[Companion, ...], Meta(max_length=MAX_COMPANIONS)] = ()
    """Tasks of its group on this node: it starts on their GPUs though they live, and they beside it."""
    prelaunch: bool = False
    """It launches though others live on its GPUs, and gets them at its gate when they are proven dead."""


@event
class StopTask(TaskOrder, frozen=True, kw_only=True):
    """SIGTERM, `grace_ms`, SIGKILL. For a task that never started: make sure that it never will."""

    TYPE = "penstock.order.stop_task"

    grace_ms: Annotated[int, Meta(ge=0)]
    reason: ShortText


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
