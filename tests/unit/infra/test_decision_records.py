"""References to decision records: a record that was merged into another one is named nowhere any more."""

from pathlib import Path

import pytest

from infra.lints import decisions
from infra.lints.decisions import references, violations

RECORD = "# A title\n\n## Context\n.\n\n## Decision\n.\n\n## Status\nAccepted.\n\n## Consequences\n.\n"

WORD = "decisions"
"""Apart from its numbers, so that the lint finds no reference in this file."""
ABSENT = f"there is no {WORD[:-1]}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the decisions 39 and 40."""
    folder = tmp_path / decisions.DECISIONS
    folder.mkdir(parents=True)
    (folder / "0039-heartbeats.md").write_text(RECORD)
    (folder / "0040-leases.md").write_text(RECORD)
    (tmp_path / "libs/code.py").write_text('"""Leases (decisions 39 and 40)."""\n')
    return tmp_path


def test_a_reference_to_a_record_that_has_left_is_found(tree: Path) -> None:
    """The record about probes became part of the one about leases, and one docstring and one link were
    forgotten."""
    assert list(violations(tree)) == []
    (tree / "libs/code.py").write_text(f'"""Leases.\n\nWhy: {WORD} 39, 40\nand 41.\n"""\n')
    (tree / "README.md").write_text(
        f"[why](libs/penstock/{WORD}/0041-probes.md), [40]({WORD}/0040-leases.md)\n"
    )
    assert list(violations(tree)) == [
        f"libs/code.py:3: {ABSENT} 41",
        f"README.md:1: {ABSENT} 0041-probes.md",
    ]


def test_counts_of_decisions_are_no_references() -> None:
    """A page about speed: how long a decision takes is no record's number."""
    assert list(references("a decision takes 40 µs; decision 0.5 ms; decisions 17 % of the time")) == []
    assert list(references("decision 0040, decisions 8 and 10")) == [(1, "40"), (1, "8"), (1, "10")]


def test_a_record_without_its_parts_and_a_number_given_twice_are_found(tree: Path) -> None:
    """Two branches took the next number, and one of them forgot what becomes worse."""
    folder = tree / decisions.DECISIONS
    (folder / "0041-probes.md").write_text(RECORD.partition("## Consequences")[0])
    [found] = violations(tree)
    assert found.endswith(
        "0041-probes.md: its parts are Context, Decision, Status, not Context, Decision, Status, Consequences"
    )
    (folder / "0041-tls.md").write_text(RECORD)
    with pytest.raises(ValueError, match=r"0041-tls\.md and 0041-probes\.md have the same number"):
        list(violations(tree))
