"""Ledgers written by an earlier version, byte for byte: a change of the code must not change a decision.

`golden/profiles.json` holds the head of each profile's ledger on the workload of
tests/simulation/cell/test_profiles.py, which compares. `golden/ledger.json.gz` holds all topics of a cell on
the embedded log: gangs, parameter servers, shares of GPUs, retries, preemption, a reboot, a fenced node,
garbage, time-outs, cancellation and two terms. `golden/state.json.gz` is the state that the earlier version
folded from it.
"""

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import FOLD_VERSION, begin, evolve
from penstock.ledger.replica.snapshot import dump
from penstock.ledger.state.state import FailedChoices
from penstock.model.decisions.ledger_events import NodeLost
from penstock.model.inputs.external_events import NodeJoined, NodeLeft
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock_services.placer.shell.replay import upcast
from tests.replay.embedded import GOLDEN, folded, read, replayed
from tests.simulation.cell.test_profiles import run
from tests.support.cluster.driver import node_spec
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "muri"
RENAMED = {"told_ms": "progress_ms", "overtaken": "backfill_count", "strays": "orphan_tasks"}
"""Fields of the state: the name in `golden/state.json.gz` → the name now."""
PARTS = {
    "retries": {
        "losses": "losses",
        "infrastructure_retries": "infrastructure",
        "memory_retries": "memory",
        "short_of": "short_of",
        "failed_on": "failed_on",
    },
    "stop": {"stop_reason": "reason", "stop_detail": "detail", "stop_token": "token"},
    "exit": {"exit_code": "code", "failure": "failure", "failure_cause": "cause"},
    "following": {"follower": "gateway", "unfollowed_ms": "absent_ms", "followed_seq": "seq"},
    "progress": {
        "attained_s": "attained_s",
        "remaining_s": "remaining_s",
        "progress_ms": "at_ms",
        "progress_attempt": "attempt",
        "eta": "eta",
        "served_ms": "served_ms",
        "runs": "runs",
    },
    "pace": {"speed": "speed", "speed_ms": "since_ms", "slowed_ms": "slowed_ms"},
    "saving": {"checkpoint": "checkpoint", "unsaved": "unsaved", "kept_ms": "kept_ms"},
    "moves": {
        "move": "latest",
        "converged_ms": "converged_ms",
        "rebalanced": "rebalanced",
        "migrations": "migrations",
    },
    "array": {"reclaims": "reclaims", "borrows": "borrows", "counted_gpus": "counted_gpus"},
    "adjustments": {"core_changes": "core_changes", "throttles": "throttles"},
    "sharing": {
        "group": "group",
        "turns": "turns",
        "measured": "measured",
        "short_ms": "short_ms",
    },
    "succession": {
        "after": "after",
        "prelaunch": "prelaunch",
        "followed": "followed",
        "false_ends": "false_ends",
    },
}
TASK_PARTS = {
    "exit": {
        "exited_ms": "at_ms",
        "cause": "cause",
        "succeeded": "succeeded",
        "exit_code": "code",
        "note": "note",
        "exhausted": "exhausted",
        "outgrown_mib": "outgrown_mib",
        "gpu_limit_mib": "gpu_limit_mib",
    },
    "cores": {
        "placed_cores": "placed",
        "cores_adjusted": "adjusted",
        "trial_cores": "trial",
        "core_probes": "probes",
        "cores_settled": "settled",
        "throttled_from": "throttled_from",
    },
}
"""Parts of the state of a job and of a task: the field then, as `RENAMED` → the name in the part now."""
ADDED_TO_NODES = {
    "epoch": 0,
    "cordon": None,
    "public_key": None,
    "replaceable": False,
    "slots": [],
    "overdrawn_memory_mib": 0,
    "overdrawn_bandwidth_mbps": 0,
    "leases": False,
    "suspicion": None,
    "reserved_cores": -1,
    "cpu_core_mask": 0,
    "said": 0,
    "distrust": None,
}
"""Fields of a node that the earlier version had not, as they are where slots are indexes and nothing has
shrunk."""
LAST_INPUTS = [
    [["penstock.estimates.v1", 0], "u35"],
    [["penstock.jobs.v1", 0], "u34"],
    [["penstock.nodes.v1", 0], "started-open-running.1.w1"],
]
ADDED = {
    "failed_choices": msgspec.structs.asdict(FailedChoices()),
    "forgotten_nodes": {},
    "refused_joins": {},
    "planned": {},
    "proposals": {},
    "arrivals": [],
    "window_until_ms": 0,
    "plan_stands": False,
    "last_inputs": LAST_INPUTS,
    "epoch": 0,
    "rejoin_offset": 0,
    "stages": {},
    "failures": [],
    "apart": {},
    "prelaunching": 0,
    "next_port": 27_783,
    "arrays": {
        "cores_per_gpu_milli": -1,
        "large_nodes": 0,
        "large_gpus": 16,
        "small_gpus": 1,
        "since_ms": 1_795_305_600_000,
        "now": {"gpu_ms": 6_961, "core_ms": 3_631, "large_peak": 32, "small_peak": 8},
        "before": {"gpu_ms": 0, "core_ms": 0, "large_peak": 0, "small_peak": 0},
    },
}
"""Fields of the state that the earlier version had not, as they are in a cell to which nothing else of them
happened."""
FORMER = ("queue_limits_gpu_s", "typical_tasks")
"""Settings of that version that are the profile's own now; they had their defaults."""
FIRST_JOINED = {"n0": 2, "n1": 3, "n2": 4}
"""Node → the record of its first joining."""
BEGAN_MS = 1_795_324_729_758
"""When the processes of the one running job began, as their node reported it."""
TRACE3_SRTF = "db5f8a5a9da037d0a2fdc8825d9045f6"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"Muri's traces are not in {DATA}; set PENSTOCK_DATA")
def test_a_published_trace_gives_the_ledger_it_always_gave() -> None:
    """Nearly ten thousand records with a thousand preemptions: `penstock simulate muri/trace3 --profile
    srtf`."""
    assert run(DATA / "trace-data/trace3.csv", "srtf", cluster="8x8").cell.head.id == TRACE3_SRTF


def test_an_old_ledger_folds_to_the_state_it_had() -> None:
    """A cell is upgraded: the new version folds the old one's ledger and goes on from the very same state."""
    golden, replica = read("ledger.json.gz"), folded()
    assert (replica.head.id, replica.head.seq) == (golden["head"], golden["seq"])
    assert check(replica.state) == []
    assert json.loads(dump(replica.state)) == expected_state()


def expected_state() -> Any:
    """What the earlier version folded, with the fields of today."""
    state = ADDED | renamed(read("state.json.gz"))
    state["settings"] |= {
        "lease_ms": 600_000,
        "batch_window_ms": 0,
        "batch_arrivals": 8,
    }
    state["settings"] |= {"share_gpus": "never", "prelaunch_wait_ms": 60_000}
    state["settings"] |= {"convergence": {"alpha": 0.01, "interval_ms": 30_000}, "contention": None}
    coda = {"cores_per_gpu": 3.0, "history_ms": 86_400_000, "max_reclaims": 3}
    state["settings"] |= {"coda": coda, "without": []}
    state["settings"] |= {"profile_settings": ""}
    for name in FORMER:
        del state["settings"][name]
    counted = {"open-running": 4, "open-waiting": 12, "second-term": 1}
    ports = {"open-running": 27_781, "second-term": 27_782}
    for job in state["jobs"].values():
        job |= {"reclaims": 0, "borrows": False, "counted_gpus": counted.get(job["job_id"], 0)}
        job |= {"port": ports.get(job["job_id"], 0)}
        for task in job["tasks"].values():
            task |= {"lease_ms": 0, "exhausted": "", "cores_adjusted": None, "bandwidth_adjusted": None}
            task |= {"gpu_limit_mib": 0, "note": "", "outgrown_mib": 0}
            task |= {"memory_bandwidth_percent": None, "checkpoint_asked": None, "saving": False}
            task |= {"began_ms": task["started_ms"] and BEGAN_MS, "ready_ms": None, "launch_ms": None}
            task |= {"placed_cores": len(task["place"]["cores"])}
            task |= {"trial_cores": [], "core_probes": 0, "cores_settled": False, "throttled_from": 0}
            task["place"] |= {"host_memory_cap_mib": 0}
        job["spec"] |= {"secrets": {}, "environment": None, "code": None, "checkpoint": "none"}
        job["spec"] |= {"preemptible": True, "min_workers": None, "global_batch_size": None}
        job["spec"] |= {"priority": 0, "prelaunch": False, "qos": None, "deadline_ms": None}
        job["spec"] |= {"companions": "tenant", "nodes": None}
        job["spec"] |= {"may_submit": False, "parents": []}
        job["spec"] |= {"long_command": None, "retry_of": None, "tied_to": None, "tied_grace_ms": 300_000}
        job["spec"]["interactive"] = False
        job |= {"stop_detail": "", "follower": "", "unfollowed_ms": None, "followed_seq": 0}
        job |= {"sharing": {"jobs": [], "since_ms": 0, "ever": False}}
        job |= {"memory_retries": 0, "short_of": {}, "estimated_attempt": 0, "held": None, "commanded_seq": 0}
        job |= {"converged_ms": None, "rebalanced": False, "migrations": 0, "runs": []}
        job |= {"unsaved": None, "failed_on": {}}
        job |= {"core_changes": 0, "throttles": 0, "measured": None, "short_ms": None}
        job |= {
            "eta": None,
            "kept_ms": 0,
            "plans_passed": 0,
            "group": "",
            "after": [],
            "turns": None,
            "speed": 1.0,
            "speed_ms": 0,
            "slowed_ms": 0.0,
            "prelaunch": False,
            "followed": False,
            "false_ends": 0,
            "progress_attempt": 0,
            "checkpoint": None,
            "workers": job["spec"]["workers"],
            "move": None,
        }
        if job["estimate"] is not None:
            job["estimate"] |= {"guessed": [], "first_of_kind": [], "options": []}
            job["estimate"] |= {"pairs": [], "stages": None, "launch_ms": None}
        for value, parts in ((job, PARTS), *((task, TASK_PARTS) for task in job["tasks"].values())):
            for part, fields in parts.items():
                value[part] = value.get(part, {}) | {now: value.pop(was) for was, now in fields.items()}
    for node_id, node in state["nodes"].items():
        node |= ADDED_TO_NODES | {"commanded_seq": FIRST_JOINED[node_id]}
        node["spec"] |= {"machine_id": None, "isolation": None, "logs": None, "measures": None, "labels": {}}
        node["spec"]["runs"] = "programs"
    return state


def test_a_changed_fold_has_a_new_version() -> None:
    """A developer changes what a fact means; without a new FOLD_VERSION services would go on from snapshots
    of the former meaning.

    When this fails: raise `penstock.ledger.fold.evolve.FOLD_VERSION` and add its digest to
    `golden/folds.json`. From version 14 on it is of the golden ledger's state after more nodes than stay
    known have come and gone.
    """
    state = folded().state
    for number in range(1_010):
        begin(state, state.seq + 1, state.now_ms + 1_000, state.term)
        for fact in come_and_gone(f"gone-{number}"):
            evolve(state, fact)
    digests = json.loads((GOLDEN / "folds.json").read_text())
    assert digests.get(str(FOLD_VERSION)) == sha256(dump(state)).hexdigest()
    assert list(digests) == [str(version) for version in range(1, FOLD_VERSION + 1)]
    assert len(set(digests.values())) == len(digests)


def come_and_gone(node_id: str) -> tuple[Event, ...]:
    return (
        NodeJoined(node=node_spec(node_id, gpus=1), incarnation=1),
        NodeLeft(node_id=node_id, boot_id="b1", proof="deleted"),
        NodeLost(node_id=node_id),
    )


def renamed(value: Any) -> Any:
    """The state with the fields' present names."""
    if isinstance(value, dict):
        return {RENAMED.get(name, name): renamed(inner) for name, inner in value.items()}
    return [renamed(inner) for inner in value] if isinstance(value, list) else value


def changed(golden: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    """The facts in which upcasting changes the ledger's records: as they were, as they are now."""
    before, after = [], []
    for record in golden["topics"][Topic.LEDGER]:
        value = record["value"].encode("latin1")
        old, new = json.loads(value), json.loads(upcast(value))
        for was, now in zip(old.pop("facts"), new.pop("facts"), strict=True):
            if was != now:
                before.append((was["type"], was["data"]))
                after.append((now["type"], now["data"]))
        assert old == new
    return before, after


async def test_an_old_ledger_is_decided_again() -> None:
    """`penstock replay` on an old cell's topics. One event had two meanings: decision 0127.

    Record 14 is the first plan of `srtf`. Today it names for whom a job stops (decision 0058), and orders
    that one at once (decision 0088); what comes later is about other starts than the recorded ones.
    """
    golden = read("ledger.json.gz")
    before, after = changed(golden)
    assert before == [("penstock.job.found_unschedulable.v1", {"job_id": "long-gang", "reason": ""})]
    assert after == [("penstock.job.found_schedulable.v1", {"job_id": "long-gang"})]
    report = await replayed()
    assert (report.void, report.head_id) == (0, golden["head"])
    assert report.different == 54
    kinds = [
        (difference["seq"], difference["recorded"], difference["again"]) for difference in report.differences
    ]
    assert [seq for seq, recorded, _ in kinds if not isinstance(recorded, str)] == [14, 17, 22]
    verdicts = [(seq, recorded, again) for seq, recorded, again in kinds if isinstance(recorded, str)]
    assert verdicts == [(seq, "committed", "rejected") for seq in (32, 33, 34, 35, 52, 53, 54)]
    first = report.differences[0]
    assert (first["seq"], stopped(first["recorded"])) == (14, [("long-gang", None)])
    assert stopped(first["again"]) == [("long-gang", "short-a")]
    assert [
        fact["data"]["after"] for fact in first["again"] if fact["type"] == "penstock.placement.decided.v1"
    ] == [["long-gang"]]


def stopped(facts: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    """(who stops, for whom)."""
    return [
        (fact["data"]["job_id"], fact["data"]["by_job_id"])
        for fact in facts
        if fact["type"] == "penstock.job.preempted.v1"
    ]
