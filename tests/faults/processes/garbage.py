"""What may arrive at a door and should not: malformed, late, oversized, absurd, from the future, twice.

Everything comes from one seeded random generator. Nothing here is a believable false report about a living
task or node (an authenticated node that lies can do as it likes with its own GPUs); it may be anything else.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.model.schema.event import REGISTRY
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic

MAX_VALUE_BYTES = 300_000
DEEP = 20_000
TYPES = {
    Topic.JOBS: (
        "penstock.job.submitted.v1",
        "penstock.job.cancel_requested.v1",
        "penstock.job.hold_requested.v1",
        "penstock.job.release_requested.v1",
        "penstock.job.checkpoint_requested.v1",
    ),
    Topic.ESTIMATES: (
        "penstock.job.estimated.v1",
        "penstock.model.trained.v1",
        "penstock.job.eta_estimated.v1",
        "penstock.profile.planned.v1",
        "penstock.stages.profiled.v1",
    ),
    Topic.NODES: (
        "penstock.task.exited.v1",
        "penstock.task.started.v1",
        "penstock.node.left.v1",
        "penstock.node.changed.v1",
        "penstock.gpu.faulted.v1",
        "penstock.order.refused.v1",
        "penstock.node.suspected.v1",
        "penstock.task.phase_changed.v1",
        "penstock.task.checkpointed.v1",
        "penstock.task.checkpoint_fetched.v1",
        "penstock.steps.measured.v1",
        "penstock.stages.measured.v1",
    ),
    Topic.PROPOSALS: (
        "penstock.plan.proposed.v2",
        "penstock.plan.proposed.v1",
        "penstock.migration.proposed.v1",
        "penstock.cores.proposed.v1",
        "penstock.throttle.proposed.v1",
    ),
    Topic.ORDERS: (
        "penstock.order.start_task.v1",
        "penstock.order.stop_task.v1",
        "penstock.order.set_cores.v1",
    ),
    Topic.LEDGER: ("penstock.ledger.record.v1",),
}

Headers = tuple[tuple[str, bytes], ...]


class Garbage(NamedTuple):
    kind: str
    headers: Headers
    value: bytes


class Generator:
    """`draw(topic)` gives one piece; `waiting`: ids of jobs that wait for ever, which proposals may name."""

    def __init__(
        self, seed: int, *, waiting: Sequence[str] = (), nodes: Sequence[str] = (), gpus: int = 4
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._waiting = (*waiting, "ghost")
        self._nodes = (*nodes, "ghost-node")
        self._gpus = gpus
        self._count = 0
        self._kinds: tuple[Callable[[Topic], Garbage], ...] = (
            self._bytes,
            self._no_object,
            self._deep,
            self._oversized,
            self._not_a_number,
            self._unknown_type,
            self._unknown_version,
            self._bad_headers,
            self._wrong_door,
            self._missing,
            self._extreme,
            self._late,
            self._late,
            self._late,
        )

    def draw(self, topic: Topic) -> Garbage:
        self._count += 1
        kind: Callable[[Topic], Garbage] = self._pick(self._kinds)
        return kind(topic)

    def _pick(self, options: Sequence[Any]) -> Any:
        return options[int(self._rng.integers(len(options)))]

    def _integer(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high))

    def _number(self) -> Any:
        return self._pick(
            (-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "1", None, True, [], {})
        )

    def _headers(self, type_name: str, **other: bytes) -> Headers:
        found = {
            "ce_specversion": b"1.0",
            "ce_id": f"garbage-{self._count}".encode(),
            "ce_source": b"/garbage",
            "ce_type": type_name.encode(),
            "content-type": b"application/json",
            **other,
        }
        return tuple(found.items())

    # ------------------------------------------------------------------------------------------- kinds

    def _bytes(self, topic: Topic) -> Garbage:
        value = self._rng.bytes(int(self._rng.integers(0, 200)))
        return Garbage("bytes", self._headers(self._pick(TYPES[topic])), value)

    def _no_object(self, topic: Topic) -> Garbage:
        value = self._pick(
            (b"[]", b"null", b'"text"', b"1", b"{", b'{"a":}', b"{}{}", b"\xef\xbb\xbf{}", b"")
        )
        return Garbage("no object", self._headers(self._pick(TYPES[topic])), value)

    def _deep(self, topic: Topic) -> Garbage:
        opening, closing = self._pick(((b"[", b"]"), (b'{"facts":', b"}")))
        depth = int(self._rng.integers(100, DEEP)) // len(opening)
        value = opening * depth + b"1" + closing * self._pick((depth, depth - 1))
        return Garbage("deep", self._headers(self._pick(TYPES[topic])), value[: MAX_EVENT_BYTES - 1])

    def _oversized(self, topic: Topic) -> Garbage:
        size = int(self._rng.integers(MAX_EVENT_BYTES + 1, MAX_VALUE_BYTES))
        fields = {**self._fields(self._pick(TYPES[topic])), "padding": "x" * size}
        return Garbage("oversized", self._headers(self._pick(TYPES[topic])), orjson.dumps(fields))

    def _not_a_number(self, topic: Topic) -> Garbage:
        type_name = self._pick(TYPES[topic])
        text = orjson.dumps(self._fields(type_name)).decode()
        digits = [at for at, character in enumerate(text) if character.isdigit() and text[at - 1] in ":,["]
        if not digits:
            return self._missing(topic)
        at = self._pick(digits)
        wrong = self._pick(("NaN", "-NaN", "Infinity", "-Infinity", "1e999", "0x10", "1_0", "01", ".5"))
        end = at
        while end < len(text) and text[end] in "0123456789.eE+-":
            end += 1
        return Garbage("not a number", self._headers(type_name), (text[:at] + wrong + text[end:]).encode())

    def _unknown_type(self, topic: Topic) -> Garbage:
        name = self._pick(
            ("penstock.job.teleported.v1", "com.example.thing", "x" * 5_000, "penstock.v1", ".", "a\nb")
        )
        return Garbage("unknown type", self._headers(name), b"{}")

    def _unknown_version(self, topic: Topic) -> Garbage:
        base = self._pick(TYPES[topic]).rpartition(".v")[0]
        version = self._pick((".v0", ".v2", ".v99", ".v-1", ".v1.0", ".v", "", ".v１", ".v" + "9" * 400))
        value = orjson.dumps(self._fields(f"{base}.v1"))
        return Garbage("unknown version", self._headers(base + version), value)

    def _bad_headers(self, topic: Topic) -> Garbage:
        type_name = self._pick(TYPES[topic])
        good = dict(self._headers(type_name))
        how = int(self._rng.integers(7))
        if how == 0:
            del good[self._pick(("ce_specversion", "ce_id", "ce_source", "ce_type"))]
        elif how == 1:
            good["ce_specversion"] = self._pick((b"0.3", b"", b"2.0", b"\xff"))
        elif how == 2:
            good["ce_id"] = self._pick((b"", b"x" * 10_000, b"\xff\xfe"))
        elif how == 3:
            good["ce_time"] = self._pick(
                (b"yesterday", b"2026-13-01T00:00:00Z", b"2026-01-01T00:00:00", b"", b"\xff")
            )
        elif how == 4:
            good = {}
        elif how == 5:
            good |= {f"h{i}": b"x" * 100 for i in range(100)} | {"ce_specversion": b"no"}
        else:
            good |= {"traceparent": b"\xff" * 10, "correlationid": b"\xfe"}
        return Garbage("bad headers", tuple(good.items()), orjson.dumps(self._fields(type_name)))

    def _wrong_door(self, topic: Topic) -> Garbage:
        """A well-formed event that belongs elsewhere: facts must not slip past their owner."""
        others = [name for name, model in sorted(REGISTRY.items()) if topic != model.TOPIC]
        return Garbage("wrong door", self._headers(self._pick(others)), orjson.dumps({"job_id": "ghost"}))

    def _missing(self, topic: Topic) -> Garbage:
        type_name = self._pick(TYPES[topic])
        fields = self._fields(type_name)
        if fields:
            del fields[self._pick(sorted(fields))]
        return Garbage("missing field", self._headers(type_name), orjson.dumps(fields))

    def _extreme(self, topic: Topic) -> Garbage:
        """Some field is absurd; names carry a ghost's, so that even a valid result is about nobody."""
        type_name = self._pick(TYPES[topic])
        fields = self._fields(type_name)
        name = self._pick(sorted(fields) or ["x"])
        if name not in ("node_id", "job_id", "task_id", "node"):
            fields[name] = self._number()
        else:
            fields[name] = self._pick(
                ("", "x" * 1_000, "ghost\x00", "../../etc", "ghost ", "-ghost", 7, None)
            )
        return Garbage(
            "extreme",
            self._headers(type_name),
            orjson.dumps(fields, option=orjson.OPT_PASSTHROUGH_DATETIME, default=str)
            if not _too_big(fields)
            else str(fields).encode(),
        )

    def _late(self, topic: Topic) -> Garbage:
        """Readable, but about jobs, tasks and nodes that are not, or not any more; proposals that cannot
        be."""
        type_name = self._pick(TYPES[topic])
        return Garbage("late", self._headers(type_name), orjson.dumps(self._fields(type_name)))

    # ------------------------------------------------------------------------------------------ fields

    def _fields(self, type_name: str) -> dict[str, Any]:
        """Plausible fields about ghosts."""
        integer = self._integer
        task = {"node_id": "ghost-node", "task_id": f"ghost-{integer(0, 9)}.1.w0", "token": integer(0, 10**6)}
        job_id = f"ghost-{integer(0, 10**6)}"
        match type_name.removeprefix("penstock.").rpartition(".v")[0]:
            case "job.submitted":
                return {"job_id": job_id, "spec": {"command": ["/bin/true"], "workers": 0}}
            case (
                "job.cancel_requested"
                | "job.hold_requested"
                | "job.release_requested"
                | "job.checkpoint_requested"
            ):
                return {"job_id": job_id, "reason": "because"}
            case "job.estimated":
                return {
                    "job_id": job_id,
                    "estimate": {
                        "worker": {"gpus": integer(0, 9)},
                        "confidence": 0.5,
                        "tier": "model",
                        "source": "s",
                    },
                }
            case "model.trained":
                return {
                    "model_version": "m1",
                    "sha256": "0" * 64,
                    "runs": 1,
                    "first_run_ms": 1,
                    "last_run_ms": 2,
                    "metrics": {"r2": 0.5},
                }
            case "task.exited":
                return {**task, "cause": "exited", "exit_code": 0, "started_ms": 1, "exited_ms": 2}
            case "task.started":
                return {**task, "pid": 1, "started_ms": 1}
            case "task.phase_changed":
                return {**task, "phase": "train", "at_ms": 1}
            case "task.checkpointed":
                return {**task, "at_ms": 1}
            case "task.checkpoint_fetched":
                return {**task, "at_ms": 1, "from_node": "n1"}
            case "order.refused":
                return {**task, "reason": "occupied", "highest_token": 1}
            case "node.left":
                return {"node_id": self._pick(self._nodes), "boot_id": "an-older-boot", "proof": "fenced"}
            case "node.changed":
                return {
                    "node": {
                        "node_id": "ghost-node",
                        "boot_id": "b",
                        "cores": integer(0, 4),
                        "host_memory_mib": 64,
                    }
                }
            case "gpu.faulted":
                return {"node_id": "ghost-node", "gpu": integer(0, 16), "fault": "xid"}
            case "node.suspected":
                return {"node_id": "ghost-node", "reason": "silence"}
            case "order.start_task" | "order.stop_task" | "order.set_cores":
                return {**task, "grace_ms": 1, "reason": "late", "cores": [0]}
            case _:
                return self._proposal(type_name)

    def _proposal(self, type_name: str) -> dict[str, Any]:
        """Plans that cannot be: GPUs that are not there or given twice, cores beyond the node, partial
        gangs."""
        job_id = self._pick(self._waiting)
        places = [
            {
                "task_id": f"{job_id}.{int(self._rng.integers(1, 3))}.w{rank}",
                "role": "worker",
                "rank": rank,
                "node_id": self._pick(self._nodes),
                "gpus": [int(self._rng.integers(0, 16)) for _ in range(int(self._rng.integers(0, 6)))],
                "cores": [int(self._rng.integers(0, 200))],
                "host_memory_mib": int(self._rng.integers(0, 1 << 24)),
            }
            for rank in range(int(self._rng.integers(1, 4)))
        ]
        plan = {"job_id": job_id, "tasks": places}
        return {
            "proposal_id": f"p{self._count}",
            "proposer": "batcher",
            "read": [{"kind": "job", "id": job_id, "version": int(self._rng.integers(0, 9))}],
            "kind": self._pick(("batch", "group")),
            "plans": [plan],
            "plan": plan,
            "reason": "why not",
            "task_id": "ghost.1.w0",
            "cores": int(self._rng.integers(0, 2_000)),
            "memory_bandwidth_percent": 50,
        }


def _too_big(fields: dict[str, Any]) -> bool:
    """Whether orjson refuses an integer in there (beyond 64 bits)."""
    return any(isinstance(value, int) and value >= 1 << 64 for value in fields.values())
