"""What Penstock decides and answers stays the same, byte by byte, while its modules move."""

from pathlib import Path

import pytest

from tests.replay.behaviour import (
    Golden,
    behaviours,
    compute,
    difference,
    first_difference,
    golden_of,
    stored,
)

BEHAVIOURS = behaviours()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if one.slow else ()) for name, one in BEHAVIOURS.items()],
)
def test_a_move_of_code_moves_no_decision_and_no_answer(name: str) -> None:
    """A developer moves a module: each ledger has the same bytes, each waiting job the same explanation.

    When this fails, `python -m tests.replay.behaviour --only NAME --former COMMIT` shows the first text that
    differs.
    """
    if missing := BEHAVIOURS[name].missing:
        pytest.skip(missing)
    moved = difference(name, stored().get(name), compute(name)[0])
    assert not moved, moved


def test_the_store_holds_each_name_and_no_other() -> None:
    """A profile is added, or goes: its hashes do so with it."""
    assert sorted(stored()) == sorted(BEHAVIOURS)


def test_a_difference_names_what_was_expected_and_the_first_text_that_differs(tmp_path: Path) -> None:
    """Of three records the second has changed: report and comparison say where, and how many there are."""
    before, after = [b"one", b'{"gpus":[0,1]}', b"three"], [b"one", b'{"gpus":[0,2]}', b"three", b"four"]
    expected, got = golden_of(before), golden_of(after)
    assert difference("x", expected, golden_of(list(before))) == ""
    said = difference("x", expected, got)
    for part in (expected.sha256, "3 texts", got.sha256, "4 texts"):
        assert part in said
    assert "expected nothing" in difference("x", None, got)
    for name, texts in (("old", before), ("new", after)):
        (tmp_path / name).write_bytes(b"".join(text + b"\n" for text in texts))
    said = first_difference(tmp_path / "old", tmp_path / "new")
    assert said.splitlines()[0] == "  text 2 of 3, now 4; from character 12 on:"
    assert 'was {"gpus":[0,1]}' in said
    assert 'is  {"gpus":[0,2]}' in said
    assert first_difference(tmp_path / "old", tmp_path / "old") == ""
    assert got == Golden(golden_of(after).sha256, 4)
