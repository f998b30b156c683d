"""The judge's own reading of the ledger: plain JSON, a chain rule and a bookkeeping that share no code with
the product.

It holds only what rules are judged by: which job waits, which gang has which places, which node may be used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import orjson

NO_PARENT = "0" * 32
TERM_STARTED = "penstock.term.started.v1"
SEQ_BITS = 40  # of a token, below the epoch
LOSSES = ("node_lost", "refused")
MAX_GPUS_PER_NODE = 16


@dataclass(slots=True)
class Job:
    """One job; `places`: task id → place of the present attempt; `living`: those not proven dead."""

    spec: dict[str, Any]
    waits: bool = False
    estimate: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    token: int = 0
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    living: dict[str, None] = field(default_factory=dict)
    caps: dict[str, int | None] = field(default_factory=dict)
    """Task id → percent of the memory bandwidth that it may use, where that was decided."""
    stop_reason: str | None = None
    after: tuple[str, ...] = ()
    """Jobs that its attempt starts after."""
    started: dict[str, None] = field(default_factory=dict)
    """Tasks of its attempt whose start was reported."""
    losses: int = 0
    exhausted: bool = False
    """Whether a task of this attempt has run out of memory."""
    estimate_again: bool = False
    """Its next attempt waits for an estimate."""
    backs_off: bool = False
    """Its next attempt takes an estimate, once, until the back-off is over."""
    held: bool = False
    """It must not be placed."""
    target: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task id → place of the next attempt, which is kept for it while it is stopped to move."""
    group: str = ""
    """With whose other members the attempt shares GPUs; of one that is alone by now, the last it had."""
    commanded: int = 0
    """Seq of its latest hold or release; 0: none."""

    @property
    def fewest(self) -> int:
        """Workers of the smallest gang that may start; of a job that is not moldable, of the only one."""
        return int(self.spec.get("min_workers") or self.spec["workers"])

    def whole(self, tasks: int) -> bool:
        """Whether so many tasks are a whole gang."""
        return self.fewest <= tasks - int(self.spec["parameter_servers"]) <= int(self.spec["workers"])

    def needs(self) -> list[dict[str, Any]]:
        """What each task of the smallest gang needs, workers first."""
        servers = [self.estimate["parameter_server"]] * self.spec["parameter_servers"]
        return [self.estimate["worker"]] * self.fewest + servers


@dataclass(slots=True)
class Node:
    """One node as the ledger has it."""

    spec: dict[str, Any]
    incarnation: int = 0
    status: str = "ready"
    faulted: dict[str, None] = field(default_factory=dict)
    """UUIDs of broken GPUs."""
    cordoned: bool = False
    slots: dict[int, str] = field(default_factory=dict)
    """Slot → UUID."""
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Task id → slots that it holds until it is proven dead."""
    cores: dict[str, set[int]] = field(default_factory=dict)
    """Task id → cores that it holds as long."""

    @property
    def present(self) -> set[str]:
        """UUIDs of the GPUs that the node has."""
        return {gpu["uuid"] for gpu in self.spec["gpus"]}

    def followed(self, place: dict[str, Any], after: Sequence[str]) -> set[str]:
        """Tasks of these jobs for which a task with this place waits here, since they hold a GPU of it."""
        return {
            task_id
            for task_id, slots in self.holders.items()
            if task_id.rsplit(".", 2)[0] in after and set(slots) & set(place["gpus"])
        }

    def uuid(self, slot: int) -> str:
        return self.slots.get(slot, f"no GPU in slot {slot}")

    def bind(self) -> None:
        """After a new inventory. While anything is held, what is known keeps its slot, and what is new takes
        one of a GPU that is gone and not held, or the next one; else slots are indexes."""
        found = [gpu["uuid"] for gpu in self.spec["gpus"]]
        held = {slot for slots in self.holders.values() for slot in slots}
        if not held:
            self.slots = dict(enumerate(found))
            return
        known, present = {uuid: slot for slot, uuid in self.slots.items()}, set(found)
        self.slots = {slot: uuid for slot, uuid in self.slots.items() if slot in held or uuid in present}
        for uuid in found:
            if uuid not in known:
                free = (slot for slot in range(MAX_GPUS_PER_NODE) if slot not in self.slots)
                slot = next(free, None)
                if slot is not None:
                    self.slots[slot] = uuid


class Book:
    """The valid chain so far. `take` reads one record of the partition."""

    def __init__(self) -> None:
        self.seq, self.id, self.term = 0, NO_PARENT, 0
        self.now_ms = 0
        self.epoch = 0
        self.void = self.records = 0
        self.placer_id = ""
        """Of the placer in office."""
        self.settings: dict[str, Any] = {}
        self.frozen = ""
        self.jobs: dict[str, Job] = {}
        self.nodes: dict[str, Node] = {}
        self._early: dict[str, dict[str, Any]] = {}

    def take(self, value: bytes) -> dict[str, Any] | None:
        """The record if it is valid, else None. Its facts are not yet booked."""
        try:
            found: dict[str, Any] = orjson.loads(value)
            facts, place = found["facts"], (found["seq"], found["parent"], found["term"])
        except (orjson.JSONDecodeError, LookupError, TypeError):
            self.void += 1
            return None
        starts_term = bool(facts) and facts[0]["type"] == TERM_STARTED
        if place != (self.seq + 1, self.id, self.term + starts_term):
            self.void += 1
            return None
        self.seq, self.id, self.term = found["seq"], sha256(value).hexdigest()[:32], found["term"]
        self.records += 1
        return found

    @property
    def token(self) -> int:
        """Of what the present record decides."""
        return self.epoch << SEQ_BITS | self.seq

    def job_of(self, task_id: str) -> Job | None:
        return self.jobs.get(task_id.rsplit(".", 2)[0])

    def members(self, group: str) -> set[str]:
        """Living tasks of the jobs of a group; of none where `group` is empty."""
        return {
            task_id for job in self.jobs.values() if group and job.group == group for task_id in job.living
        }

    def together(self, task_id: str, other_id: str) -> bool:
        """Whether these tasks may have the same GPUs and cores: their jobs are of one group."""
        one, other = self.job_of(task_id), self.job_of(other_id)
        return one is not None and other is not None and bool(one.group) and one.group == other.group

    def write(self, kind: str, fact: dict[str, Any]) -> None:
        """Books one fact. Each kind has one of these functions."""
        job = self.jobs.get(fact["job_id"]) if "job_id" in fact else None
        node = self.nodes.get(fact["node_id"]) if "node_id" in fact else None
        self._write_cell(kind, fact)
        self._write_waiting(kind, fact, job)
        self._write_gang(kind, fact, job)
        self._write_task(kind, fact, job, node)
        self._write_inventory(kind, fact)
        self._write_node(kind, fact, node)

    def _write_cell(self, kind: str, fact: dict[str, Any]) -> None:
        """Term, epoch, and whether the cell is frozen."""
        match kind:
            case "penstock.term.started":
                self.settings, self.placer_id = fact["settings"], fact["placer_id"]
            case "penstock.ledger.accepted":
                self.epoch = fact["epoch"]
            case "penstock.cell.frozen":
                self.frozen = fact["reason"]
            case "penstock.cell.thawed":
                self.frozen = ""

    def _write_waiting(self, kind: str, fact: dict[str, Any], job: Job | None) -> None:
        """Which jobs there are, and which of them wait, are held or back off."""
        match kind:
            case "penstock.job.submitted":
                early = self._early.pop(fact["job_id"], {})
                self.jobs[fact["job_id"]] = Job(fact["spec"], bool(early), early)
            case "penstock.job.estimated" if job is None:
                self._early[fact["job_id"]] = fact["estimate"]
            case "penstock.job.estimated" if job is not None:
                job.waits, job.estimate = not job.backs_off, fact["estimate"]
                job.estimate_again = job.backs_off = False
            case "penstock.job.requeued" if job is not None:
                job.estimate_again = fact.get("estimate_again", False)
                job.waits = fact.get("not_before_ms") is None and not job.estimate_again
                job.backs_off = fact.get("not_before_ms") is not None
                job.losses += fact["reason"] in LOSSES
                if fact["reason"] != "migrated":
                    self._drop_target(job)
                job.places, job.stop_reason = {}, None
            case "penstock.job.queued" if job is not None:
                job.waits, job.backs_off = True, False
            case "penstock.job.hold_requested" | "penstock.job.release_requested" if job is not None:
                job.held, job.commanded = kind == "penstock.job.hold_requested", self.seq
            case "penstock.job.ended":
                if job is not None:
                    self._drop_target(job)
                self.jobs.pop(fact["job_id"], None)

    def _write_gang(self, kind: str, fact: dict[str, Any], job: Job | None) -> None:
        """Which gang has which places, and which are kept for its next attempt."""
        match kind:
            case "penstock.placement.decided" if job is not None:
                job.waits, job.stop_reason, job.exhausted = False, None, False
                self._drop_target(job)
                job.attempt, job.token, job.caps = fact["attempt"], self.token, {}
                job.group, job.after = fact.get("group", ""), tuple(fact.get("after", ()))
                job.places = {place["task_id"]: dict(place) for place in fact["tasks"]}
                job.living, job.started = dict.fromkeys(job.places), {}
                self._hold(job.places)
            case "penstock.group.decided":
                for member in (self.jobs[job_id] for job_id in fact["job_ids"]):
                    if member.living:
                        member.group = fact["group_id"]
            case "penstock.move.decided" if job is not None:
                job.target = {place["task_id"]: dict(place) for place in fact["tasks"]}
                self._hold(job.target)
            case "penstock.move.given_up" if job is not None:
                self._drop_target(job)
            case "penstock.stop.decided" if job is not None:
                if fact["reason"] != "migrated":
                    self._drop_target(job)
                job.stop_reason = fact["reason"]

    def _write_task(self, kind: str, fact: dict[str, Any], job: Job | None, node: Node | None) -> None:
        """Cores and bandwidth of one task, and its end, which frees what it holds."""
        match kind:
            case "penstock.cores.decided" if job is not None and node is not None:
                job.places[fact["task_id"]]["cores"] = fact["cores"]
                node.cores[fact["task_id"]] = set(fact["cores"])
            case "penstock.bandwidth.decided" if job is not None:
                job.caps[fact["task_id"]] = fact["memory_bandwidth_percent"]
            case "penstock.task.started":
                starter = self.job_of(fact["task_id"])
                if starter is not None:
                    starter.started[fact["task_id"]] = None
            case "penstock.task.exited" | "penstock.task.lost" | "penstock.order.refused":
                owner = self.job_of(fact["task_id"])
                if owner is not None:
                    owner.living.pop(fact["task_id"], None)
                    owner.exhausted |= bool(fact.get("exhausted"))
                if node is not None:
                    node.holders.pop(fact["task_id"], None)
                    node.cores.pop(fact["task_id"], None)
                    node.faulted |= dict.fromkeys(fact.get("missing_gpus", ()))

    def _write_inventory(self, kind: str, fact: dict[str, Any]) -> None:
        """What a node has, as it reports itself."""
        if kind not in ("penstock.node.joined", "penstock.node.changed"):
            return
        name = fact["node"]["node_id"]
        known = self.nodes.setdefault(name, Node(fact["node"]))
        known.spec = fact["node"]
        known.faulted = {fault["uuid"]: None for fault in fact.get("faults", ())}
        known.bind()
        if kind == "penstock.node.joined":
            known.status = "ready"
            known.incarnation = max(known.incarnation, fact.get("incarnation", 0))

    def _write_node(self, kind: str, fact: dict[str, Any], node: Node | None) -> None:
        """Which node may be used: status, cordon, broken GPUs."""
        match kind:
            case "penstock.node.suspected" | "penstock.node.left" if node is not None:
                node.status = "suspect" if node.status == "ready" else node.status
            case "penstock.node.cordoned" | "penstock.node.uncordoned" if node is not None:
                node.cordoned = kind == "penstock.node.cordoned"
            case "penstock.node.lost" if node is not None:
                node.status = "gone"
            case "penstock.node.restored" if node is not None:
                node.status = "ready"
            case "penstock.gpu.faulted" if node is not None:
                node.faulted[fact.get("uuid") or node.spec["gpus"][fact["gpu"]]["uuid"]] = None

    def _hold(self, places: dict[str, dict[str, Any]]) -> None:
        """Books GPUs and cores of these places for their tasks."""
        for task_id, place in places.items():
            self.nodes[place["node_id"]].holders[task_id] = tuple(place["gpus"])
            self.nodes[place["node_id"]].cores[task_id] = set(place["cores"])

    def _drop_target(self, job: Job) -> None:
        """Nothing is kept for it any more."""
        for task_id, place in job.target.items():
            self.nodes[place["node_id"]].holders.pop(task_id, None)
            self.nodes[place["node_id"]].cores.pop(task_id, None)
        job.target = {}

    def could_fit(self, job: Job) -> bool:
        """A sufficient test: whether the gang fits nodes that are not gone, if they were empty; shares as
        whole GPUs."""
        names = ("cores", "host_memory_mib", "bandwidth_mbps")
        left = [
            (node.spec["gpus"], [len(node.spec["gpus"]), *(node.spec[name] for name in names)])
            for node in self.nodes.values()
            if node.status != "gone"
        ]
        for need in job.needs():
            asked = [need["gpus"], *(need[name] for name in names)]
            for gpus, free in left:
                models, memory_mib = job.spec["gpu_models"], need["gpu_memory_mib"]
                suits = not need["gpus"] or all(
                    gpu["memory_mib"] >= memory_mib and gpu["model"] in (models or (gpu["model"],))
                    for gpu in gpus
                )
                if suits and all(has >= wanted for has, wanted in zip(free, asked, strict=True)):
                    free[:] = [has - wanted for has, wanted in zip(free, asked, strict=True)]
                    break
            else:
                return False
        return True
