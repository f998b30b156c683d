"""The projector's pure half: what rows a ledger gives, however it is cut into batches."""

import itertools
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.codegen.examples import EXAMPLES
from penstock.ledger.record.record import GENESIS, Draft, read, write
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.views import job_changes, job_row
from penstock.model.decisions.adjustments import BandwidthDecided, CoresDecided
from penstock.model.decisions.decisions import is_decision
from penstock.model.decisions.ledger_events import TimerFired, TimerSet
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    NodeChanged,
    NodeJoined,
    NodeLeft,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event, UnknownFact, wire_type
from penstock_services.projector.core.projection import JOB_CHANGES, Projection
from penstock_services.projector.shell.store import REPLACED, _json
from tests.support.cluster.hand_placer import HandPlacer, node_spec

Tables = dict[str, dict[tuple[object, ...], dict[str, Any]]]


def project(values: list[bytes], cuts: list[int]) -> Tables:
    """The tables after the ledger, one batch per cut."""
    projection = Projection(Replica())
    tables: Tables = {name: {} for name in (*REPLACED, "decisions", "events")}
    edges = [0, *sorted(cuts), len(values)]
    for begin, end in itertools.pairwise(edges):
        for offset in range(begin, end):
            projection.take(values[offset], offset)
        batch = projection.drain()
        for table, rows in batch.items():
            for row in orjson.loads(orjson.dumps(rows)):
                if table == "shrunk":
                    gone = [k for k in tables["gpus"] if k[0] == row["node_id"] and k[1] >= row["gpu"]]
                    for key in gone:
                        del tables["gpus"][key]
                    continue
                if table == "forgotten":
                    tables["nodes"].pop((row["node_id"],), None)
                    continue
                if table == "job_changes":
                    tables["jobs"][row["job_id"],] |= row
                    continue
                names = REPLACED.get(table, "seq, n").split(", ")
                key = tuple(row[name] for name in names)
                assert table in REPLACED or key not in tables[table], f"{table} {key} twice"
                tables[table][key] = row
    return tables


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), data=st.data())
def test_tables_do_not_depend_on_batches(seed: int, data: st.DataObject) -> None:
    """Under load hundreds of records make one batch, on a quiet day each makes its own: the tables are equal.

    This is what lets `verify` compare tables written live with a replay in large batches.
    """
    placer = HandPlacer()
    placer.join(node_spec("n0", 4), node_spec("n1", 2))
    placer.wander(np.random.default_rng(seed), 40)
    cuts = data.draw(st.lists(st.integers(0, len(placer.values)), max_size=12))
    assert project(placer.values, cuts) == project(placer.values, list(range(len(placer.values))))


def test_forgotten_nodes_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines come and go under new names, and one comes back: whatever the batches, its row is there and
    theirs are not."""
    monkeypatch.setattr("penstock.ledger.derived.departed.MAX_GONE_NODES", 2)
    placer = HandPlacer()
    for number in [*range(8), 1, 8, 9]:
        placer.join(node_spec(f"n{number}", 2))
        placer.feed(NodeLeft(node_id=f"n{number}", boot_id="boot-1", proof="deleted"))
        placer.now_ms += PlacerSettings().freeze_window_ms
    every = [project(placer.values, cuts) for cuts in ([], [5, 11, 16], list(range(len(placer.values))))]
    assert every[0] == every[1] == every[2]
    assert {key[0] for key in every[0]["nodes"]} == set(placer.state.nodes)
    assert {key[0] for key in every[0]["gpus"]} == set(placer.state.nodes)
    assert len(placer.state.nodes) <= 5


def test_a_job_from_submission_to_exit() -> None:
    """One training run: its row holds what was asked, where it ran, when and how it ended."""
    placer = HandPlacer(now_ms=1_000)
    placer.join(node_spec("n0", 2))
    placer.submit("j1", spec=JobSpec(command=("python", "t.py"), owner="ana", labels={"team": "x"}))
    placer.start("j1")
    placer.finish("j1")
    tables = project(placer.values, [])
    row = tables["jobs"]["j1",]
    assert (row["status"], row["outcome"], row["exit_code"], row["owner"]) == (
        "succeeded",
        "succeeded",
        0,
        "ana",
    )
    times = [row[name] for name in ("submitted_ms", "queued_ms", "placed_ms", "running_ms", "ended_ms")]
    assert times == [1_030, 1_040, 1_040, 1_050, 1_060]
    assert (row["nodes"], row["gpus"], row["labels"]) == (["n0"], 1, {"team": "x"})
    (task,) = tables["tasks"].values()
    assert (task["status"], task["pid"], task["exit_code"], task["usage"]["cpu_ms"]) == (
        "exited",
        4_000,
        0,
        None,
    )
    assert tables["gpus"]["n0", 0]["task_id"] is None
    assert tables["nodes"]["n0",]["gpus_free"] == 2
    assert [e["type"] for e in tables["events"].values() if e["job_id"] == "j1"] == [
        "penstock.job.submitted",
        "penstock.job.estimated",
        "penstock.placement.decided",
        "penstock.timer.set",
        "penstock.task.started",
        "penstock.task.exited",
        "penstock.job.ended",
    ]


def test_a_gang_holds_its_gpus_until_each_exit() -> None:
    """Two workers on one node; the first exit frees one GPU, not both."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 4))
    placer.submit("gang", gpus=1, spec=JobSpec(command=("true",), workers=2))
    held = project(placer.values, [])
    assert [held["gpus"]["n0", g]["job_id"] for g in range(4)] == ["gang", "gang", None, None]
    placer.start("gang")
    placer.feed(JobCancelRequested(job_id="gang"))
    assert {t["status"] for t in project(placer.values, [])["tasks"].values()} == {"stopping"}
    placer.finish("gang", exit_code=0)
    done = project(placer.values, [])
    assert [done["gpus"]["n0", g]["job_id"] for g in range(4)] == [None] * 4
    assert done["jobs"]["gang",]["outcome"] == "cancelled"


def test_other_cores_of_a_running_task_are_in_the_tables() -> None:
    """An operator gives a starving loader more cores: `get nodes` and `describe` show it, however the ledger
    was cut, and `verify` agrees."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 1))
    placer.submit("j1")
    placer.start("j1")
    ((task_id, task),) = placer.state.jobs["j1"].tasks.items()
    free, more = placer.state.nodes["n0"].free_core_mask.bit_count(), (*task.place.cores, 3)
    fields = {
        "job_id": "j1",
        "attempt": 1,
        "task_id": task_id,
        "node_id": "n0",
        "by": "ops/ana",
        "reason": "",
    }
    placer.feed(CoresDecided(**fields, cores=more))
    placer.feed(BandwidthDecided(**fields, memory_bandwidth_percent=40))
    for cuts in ([], list(range(len(placer.values)))):
        tables = project(placer.values, cuts)
        assert tables["tasks"][task_id,]["cores"] == list(more)
        assert tables["jobs"]["j1",]["cores"] == len(more)
        assert tables["nodes"]["n0",]["cores_free"] == free - 1
        kinds = [row["kind"] for row in tables["decisions"].values()]
        assert kinds[-2:] == ["penstock.cores.decided", "penstock.bandwidth.decided"]


@pytest.mark.parametrize("decision", sorted(filter(is_decision, EXAMPLES.values()), key=wire_type))
def test_every_decision_has_a_row(decision: Event) -> None:
    """Whoever traces a cell's decisions finds each in the list, with its data and its cause."""
    fact, projection = decision, Projection(Replica())
    cause = {"topic": "penstock.jobs.v1", "partition": 0, "offset": 0, "event_id": "e1"}
    _, value = write(GENESIS, Draft(1, 1, cause, "committed", None, (fact,)))
    projection._log(read(value), 0, fact, *projection._subjects(fact))
    [row] = projection.drain()["decisions"]
    assert (row["kind"], row["cause"]["event_id"]) == (decision.TYPE, "e1")


def test_timers_and_facts_of_a_later_version_are_no_decisions() -> None:
    """The list of decisions is read by people: what only drives the placer, or is unknown, is not in it."""
    timers = [EXAMPLES[wire_type(model)] for model in (TimerSet, TimerFired)]
    assert not any(map(is_decision, (*timers, UnknownFact())))


def test_a_placement_carries_its_reasons() -> None:
    placer = HandPlacer()
    placer.join(node_spec("n0", 1), node_spec("n1", 1), node_spec("n2", 0))
    placer.submit("j1")
    decisions = project(placer.values, [])["decisions"].values()
    (placed,) = [row for row in decisions if row["kind"] == "penstock.placement.decided"]
    assert placed["explanation"]["candidates"][0]["nodes"] == ["n0"]
    assert placed["explanation"]["rejected"] == {"gpus_too_few": 1}
    assert placed["cause"]["topic"] == "penstock.estimates.v1"


def test_a_void_record_moves_nothing_but_the_offset() -> None:
    """A zombie placer's late record lies between two valid ones: it is in no row."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 1))
    placer.submit("j1")
    zombie = [*placer.values[:2], placer.values[0], b"no record at all", *placer.values[2:]]
    assert project(zombie, [1, 3]) == project(placer.values, [])
    projection = Projection(Replica())
    assert [projection.take(value, offset) is not None for offset, value in enumerate(zombie)] == [
        True,
        True,
        False,
        False,
        *[True] * (len(placer.values) - 2),
    ]
    assert projection.replica.offset == len(zombie)


def test_a_node_that_returns_with_fewer_gpus_loses_their_rows() -> None:
    placer = HandPlacer()
    placer.join(node_spec("n0", 4))
    placer.feed(GpuFaulted(node_id="n0", gpu=1, fault="xid", code=79))
    assert project(placer.values, [])["gpus"]["n0", 1]["faulted"] is True
    placer.feed(NodeJoined(node=node_spec("n0", 2, boot_id="boot-2")))
    tables = project(placer.values, [2])
    assert sorted(tables["gpus"]) == [("n0", 0), ("n0", 1)]
    assert tables["gpus"]["n0", 1]["faulted"] is False
    assert tables["nodes"]["n0",]["boot_id"] == "boot-2"


def test_a_gpu_that_is_gone_is_listed_while_it_is_held() -> None:
    """GPU 1 is pulled under its task: the table shows whose it is, and that it is gone."""
    placer = HandPlacer()
    spec = node_spec("n0", 3)
    placer.join(spec)
    for job_id in ("a", "b", "c"):
        placer.submit(job_id)
        placer.start(job_id)
    left = tuple(msgspec.structs.replace(spec.gpus[old], index=new) for new, old in enumerate((2, 0)))
    placer.feed(NodeChanged(node=msgspec.structs.replace(spec, gpus=left)))
    tables = project(placer.values, [])
    rows = [tables["gpus"]["n0", slot] for slot in range(3)]
    assert [(row["uuid"], row["model"], row["faulted"], row["job_id"]) for row in rows] == [
        ("n0-gpu-0", "V100", False, "a"),
        ("n0-gpu-1", "gone", True, "b"),
        ("n0-gpu-2", "V100", False, "c"),
    ]
    placer.finish("b")
    placer.feed(NodeChanged(node=msgspec.structs.replace(spec, gpus=left)))
    assert project(placer.values, [])["gpus"]["n0", 1]["uuid"] == ""


def test_a_task_names_the_gpus_that_it_had() -> None:
    """GPU 0 is pulled once its job has ended, and its slot goes to another card: what the job had stays what
    it had."""
    placer = HandPlacer()
    spec = node_spec("n0", 3)
    placer.join(spec)
    for job_id in ("a", "b"):
        placer.submit(job_id)
        placer.start(job_id)
    placer.finish("a")
    new = msgspec.structs.replace(spec.gpus[0], index=2, uuid="new")
    left = (*(msgspec.structs.replace(spec.gpus[old], index=old - 1) for old in (1, 2)), new)
    placer.feed(NodeChanged(node=msgspec.structs.replace(spec, gpus=left)))
    placer.submit("c", gpus=2)
    for cuts in ([], list(range(len(placer.values)))):
        tasks = project(placer.values, cuts)["tasks"]
        assert {row["job_id"]: (row["gpus"], row["gpu_uuids"]) for row in tasks.values()} == {
            "a": ([0], ["n0-gpu-0"]),
            "b": ([1], ["n0-gpu-1"]),
            "c": ([0, 2], ["new", "n0-gpu-2"]),
        }


def test_a_refused_input_is_in_the_stream() -> None:
    """A duplicate submission leaves its trace for whoever wonders where it went."""
    placer = HandPlacer()
    placer.submit("j1")
    placer.submit("j1")
    refused = [
        e for e in project(placer.values, [])["events"].values() if e["type"] == "penstock.input.rejected"
    ]
    assert [e["data"]["reason"] for e in refused] == ["duplicate_job", "duplicate_estimate"]


@pytest.mark.parametrize(
    ("text", "stored"),
    [("a\0b", "a\ufffdb"), ("\\u0000", "\\u0000"), ("\\\0", "\\\ufffd"), ("plain", "plain")],
)
def test_nul_never_reaches_postgres(text: str, stored: str) -> None:
    """A label or a failure's detail may hold NUL, which Postgres cannot store; one must not stop the
    projector."""
    assert orjson.loads(_json([{"x": text}])) == [{"x": stored}]


def test_a_later_row_of_a_job_has_the_columns_that_change():
    """The statement of a batch sets exactly these columns; one that a row lacks would become NULL."""
    job = JobState("job-1", JobSpec(command=("true",)), 1, 1_000)

    changes, row = job_changes(job, 7), job_row(job, 7)

    assert tuple(changes) == JOB_CHANGES
    assert {name: row[name] for name in JOB_CHANGES} == changes
