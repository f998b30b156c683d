"""The tables of legal moves: complete, without dead ends, and equal to the diagrams in the docs."""

import os
import subprocess
import sys
from types import MappingProxyType
from typing import Any

import pytest

from infra.codegen.docs import BLOCKS, UnknownBlock, mermaid, regenerate, stale
from infra.codegen.schemas import ROOT
from penstock.model.nouns.transitions import (
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    TASK_TRANSITIONS,
    TERMINAL,
    IllegalTransition,
    JobStatus,
    NodeStatus,
    TaskStatus,
    transition,
)

Table = MappingProxyType[Any, frozenset[Any]]
TABLES: list[tuple[Table, Any, Any]] = [
    (JOB_TRANSITIONS, JobStatus, JobStatus.SUBMITTED),
    (TASK_TRANSITIONS, TaskStatus, TaskStatus.ASSIGNED),
    (NODE_TRANSITIONS, NodeStatus, NodeStatus.READY),
]
each_table = pytest.mark.parametrize(("table", "states", "start"), TABLES, ids=["job", "task", "node"])


def reachable(table: Table, start: Any) -> set[Any]:
    """Every state that moves lead to from `start`, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        fresh = table[waiting.pop()] - found
        found |= fresh
        waiting += fresh
    return found


@each_table
def test_every_state_has_a_row_and_can_be_reached(table: Table, states: Any, start: Any) -> None:
    """A state was added to the enum and not to the table: the first job in it would stop the service."""
    assert set(table) == set(states)
    assert reachable(table, start) == set(states)
    assert next(iter(table)) == start, "diagrams begin at the first row"


@each_table
def test_no_state_moves_to_itself(table: Table, states: Any, start: Any) -> None:
    """A repeated event must be recognised as such by its handler, never pass as a move."""
    assert all(state not in table[state] for state in states)


def test_exactly_the_endings_have_no_exits() -> None:
    """A job that has ended stays ended, however late an exit or a cancel arrives."""
    assert {state for state in JobStatus if not JOB_TRANSITIONS[state]} == TERMINAL
    assert {state for state in TaskStatus if not TASK_TRANSITIONS[state]} == {TaskStatus.EXITED}
    assert all(NODE_TRANSITIONS[state] for state in NodeStatus), "a node may always come back"


def test_from_every_state_some_ending_can_be_reached() -> None:
    """No job may be caught in a circle that leads nowhere; each live one can be cancelled in the end."""
    for state in JobStatus:
        assert reachable(JOB_TRANSITIONS, state) & TERMINAL
        assert JobStatus.CANCELLED in reachable(JOB_TRANSITIONS, state) or state in TERMINAL


def test_nothing_runs_without_having_been_launched() -> None:
    """LAW 4: a start without a decision would be somebody else's process."""
    assert [old for old in JobStatus if JobStatus.RUNNING in JOB_TRANSITIONS[old]] == [JobStatus.LAUNCHING]
    assert [old for old in JobStatus if JobStatus.LAUNCHING in JOB_TRANSITIONS[old]] == [JobStatus.QUEUED]


@each_table
def test_move_follows_the_table_exactly(table: Table, states: Any, start: Any) -> None:
    """The fold trusts `move` alone; what it lets through becomes the state of everybody."""
    for old in states:
        for new in states:
            if new in table[old]:
                assert transition(table, old, new, "job j-1") is new
            else:
                with pytest.raises(IllegalTransition):
                    transition(table, old, new, "job j-1")


def test_an_illegal_move_reports_its_trace() -> None:
    """At three in the morning the message is all there is: who, from where, to where, what would be legal."""
    with pytest.raises(
        IllegalTransition, match=r"job j-1 at seq 7: succeeded may not become running.*it has ended"
    ):
        transition(JOB_TRANSITIONS, JobStatus.SUCCEEDED, JobStatus.RUNNING, "job j-1 at seq 7")
    with pytest.raises(IllegalTransition, match="node n-1: gone may not become suspect; it may become ready"):
        transition(NODE_TRANSITIONS, NodeStatus.GONE, NodeStatus.SUSPECT, "node n-1")


@each_table
def test_the_diagram_shows_every_move_and_no_other(table: Table, states: Any, start: Any) -> None:
    """People reason on the diagram; it must be the table."""
    head, *arrows = mermaid(table).splitlines()
    diagram = {tuple(line.strip().split(" --> ")) for line in arrows}
    ends = {(str(state), "[*]") for state in states if not table[state]}
    moves = {(str(old), str(new)) for old in states for new in table[old]}
    assert head == "stateDiagram-v2"
    assert diagram == moves | ends | {("[*]", str(start))}
    assert len(arrows) == len(diagram)


def test_nothing_that_holds_resources_ends_by_a_word() -> None:
    """A cancel or a time-out of a running job frees its GPUs only when the exit is proven: through
    STOPPING."""
    for state in (JobStatus.LAUNCHING, JobStatus.RUNNING):
        assert JOB_TRANSITIONS[state] & TERMINAL == {JobStatus.SUCCEEDED, JobStatus.FAILED}


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_diagrams_do_not_depend_on_the_hash_seed(seed: str) -> None:
    """Each process hashes differently; the docs would differ in every other commit."""
    code = "from infra.codegen.docs import *; print(mermaid(JOB_TRANSITIONS))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == mermaid(JOB_TRANSITIONS)


def test_generated_blocks_in_the_docs_are_current() -> None:
    """Somebody changed a table, an event or a setting and forgot `make docs`."""
    assert [str(path.relative_to(ROOT)) for path in stale(ROOT)] == []


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_an_outdated_block_is_noticed_and_renewed(name: str) -> None:
    """The text around it belongs to its author and stays as it is."""
    outdated = f"# Mine\n<!-- generated: {name} -->\nold news\n<!-- end -->\nAlso mine.\n"
    renewed = regenerate(outdated, "README.md")
    assert "old news" not in renewed
    assert BLOCKS[name]() in renewed
    assert renewed.startswith("# Mine\n")
    assert renewed.endswith("<!-- end -->\nAlso mine.\n")
    assert regenerate(renewed, "README.md") == renewed


def test_a_block_that_cannot_be_written_is_an_error() -> None:
    """A typo in the mark must not leave a block that silently ages."""
    with pytest.raises(UnknownBlock, match=r"README\.md: there is no block 'state-job'"):
        regenerate("<!-- generated: state-job -->\n<!-- end -->\n", "README.md")
    with pytest.raises(UnknownBlock, match="does not end"):
        regenerate("<!-- generated: states-job -->\nand so on\n", "README.md")
