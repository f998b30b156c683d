"""What a node has said counts once: a copy that comes later, whoever sent it again, changes nothing."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.ledger.replica.snapshot import dump
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    CountedTaskEvent,
    GpuFaulted,
    NodeJoined,
    RunningTask,
    StageSample,
    StagesMeasured,
    StepsMeasured,
    TaskCheckpointed,
    TaskPhaseChanged,
)
from penstock_services.node_reporter.shell.link import outbox
from penstock_services.node_reporter.shell.link.outbox import Counter
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, node_spec

TASK = "a.1.w0"


class Node:
    """The node of a cell in which job `a` runs. `said`: number of its joining; 0: it counts nothing."""

    def __init__(self, said: int) -> None:
        self.cell = CellDriver()
        self.join(said, 1)
        self.cell.submit("a")
        self.cell.start("a")

    def join(self, said: int, incarnation: int) -> None:
        jobs = self.cell.state.jobs.values()
        tasks = tuple(RunningTask(task_id=task, token=job.token) for job in jobs for task in job.tasks)
        self.cell.feed(NodeJoined(node=node_spec("n1", 2), incarnation=incarnation, tasks=tasks, said=said))

    def say(self, report: CountedTaskEvent | GpuFaulted, said: int) -> Step:
        return self.cell.feed(replace(report, said=said))

    def state(self) -> dict[str, Any]:
        """Of the cell, but for how far its inputs are answered."""
        found = json.loads(dump(self.cell.state))
        return {name: found[name] for name in found.keys() - {"seq", "positions", "last_inputs"}}

    def of_task(self) -> dict[str, object]:
        return {
            "node_id": "n1",
            "task_id": TASK,
            "token": self.cell.job("a").token,
            "at_ms": self.cell.now_ms,
        }


def phase(node: Node, name: str) -> TaskPhaseChanged:
    return TaskPhaseChanged(**node.of_task(), phase=name)  # type: ignore[arg-type]


def saved(node: Node, iteration: int) -> TaskCheckpointed:
    return TaskCheckpointed(**node.of_task(), path=f"/c/{iteration}", iteration=iteration)


REPORTS: dict[str, Callable[[Node], list[CountedTaskEvent | GpuFaulted]]] = {
    "phases": lambda node: [phase(node, "train"), phase(node, "save"), phase(node, "train")],
    "checkpoints": lambda node: [saved(node, 10), saved(node, 20), saved(node, 30)],
    "fetched": lambda node: [
        saved(node, 10),
        CheckpointFetched(**node.of_task(), from_node="n1", path="/d/10", iteration=10),
        saved(node, 20),
    ],
    "steps": lambda node: [StepsMeasured(**node.of_task(), done=done) for done in (1, 2, 4)],
    "stages": lambda node: [
        StagesMeasured(**node.of_task(), iterations=1, samples=(StageSample(lasted_ms=float(ms)),))
        for ms in (1, 2, 3)
    ],
    "faults": lambda node: [
        GpuFaulted(node_id="n1", gpu=gpu, uuid=f"GPU-n1-{gpu}", fault="xid", code=code, incarnation=1)
        for gpu, code in ((0, 1), (1, 1), (0, 2))
    ],
}


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_that_comes_again_changes_nothing(kind: str) -> None:
    """Somebody with the right to the nodes' topic writes a node's signed reports of the last hour there
    again."""
    node = Node(said=100)
    reports = REPORTS[kind](node)
    for number, report in enumerate(reports, start=101):
        assert node.say(report, number).outcome == "committed"
    before = node.state()
    for number, report in enumerate(reports, start=101):
        step = node.say(report, number)
        assert (step.outcome, step.reason, step.facts) == ("rejected", "replayed", ())
    assert node.state() == before


def test_a_batch_whose_fate_was_unknown_is_sent_again_without_harm() -> None:
    """The log takes two of three reports and the connection breaks: the reporter sends all three again, then
    goes on."""
    node, other = Node(said=7), Node(said=7)
    reports = [phase(node, "train"), saved(node, 10), phase(node, "save"), phase(node, "train")]
    sent = [(reports[n], 8 + n) for n in (0, 1, 0, 1, 2, 3)]
    assert [node.say(*found).outcome for found in sent] == [
        "committed",
        "committed",
        "rejected",
        "rejected",
        "committed",
        "committed",
    ]
    for n, report in enumerate(reports):
        other.say(report, 8 + n)
    assert node.cell.job("a") == other.cell.job("a")


def test_a_reporter_that_does_not_count_is_believed_as_before() -> None:
    """Half of the nodes have the former version. One is upgraded, and set back again a week later."""
    node = Node(said=0)
    for _ in range(2):
        assert node.say(phase(node, "train"), 0).outcome == "committed"
    node.join(1_000, 2)
    assert node.say(phase(node, "save"), 0).reason == "replayed", "what it said before the upgrade is over"
    assert node.say(phase(node, "save"), 1_001).outcome == "committed"
    node.join(0, 3)
    assert node.say(phase(node, "train"), 0).outcome == "committed"


def test_a_joining_ends_all_that_was_said_before() -> None:
    """A report of before the restart is written again after it."""
    node = Node(said=50)
    node.say(saved(node, 10), 51)
    node.say(saved(node, 20), 52)
    node.join(60, 2)
    assert node.say(saved(node, 10), 51).reason == "replayed"
    assert node.say(saved(node, 30), 61).outcome == "committed"


def test_numbers_go_on_above_the_journals_whatever_the_clock_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reporter begins anew, once with its clock set back and once with a new journal."""
    monkeypatch.setattr(outbox, "wall_ms", lambda: 1_000)
    counter = Counter(5_000)
    report = GpuFaulted(node_id="n1", gpu=0, fault="xid")
    assert [counter.count(report).said for _ in range(2)] == [5_001, 5_002]  # type: ignore[attr-defined]
    assert Counter(0).count(report).said == 1_001  # type: ignore[attr-defined]
