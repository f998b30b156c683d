"""Rooms keep their budgets: what was added needs a deletion, or a decision record that raises a row."""

import ast
from pathlib import Path

import pytest

from infra.lints import budgets
from infra.lints.budgets import (
    WHOLE,
    Size,
    Source,
    above,
    constants_in,
    long_functions,
    public_names,
    room_of,
    rooms,
    rounded,
    written,
)

PYPROJECT = """[tool.other]
width = 1

[tool.penstock.budgets]
# What the numbers mean.
"libs/penstock/gone" = [5, 1, 1, 0]

[tool.last]
kept = true
"""


def test_a_room_above_its_row_a_new_room_and_a_row_without_a_room_are_found() -> None:
    """A capability is added to a full room, another one in a folder of its own; a third room was deleted."""
    today = {"libs/penstock/log": Size(101, 3, 10, 2), "libs/penstock/quota": Size(40, 1, 4, 1)}
    allowed = {"libs/penstock/log": Size(100, 3, 9, 2), "libs/penstock/old": Size(9, 1, 1, 0)}
    assert [line.partition(";")[0].partition(": delete")[0] for line in above(today, allowed)] == [
        "libs/penstock/log: 101 lines, 100 at most",
        "libs/penstock/log: 10 names, 9 at most",
        "libs/penstock/quota: a new room",
        "libs/penstock/old: its row in pyproject.toml has no room",
    ]
    assert list(above(today, {**today, "libs/penstock/log": Size(101, 3, 10, 9)})) == []


def test_every_file_of_the_product_belongs_to_one_room() -> None:
    """Rooms of scheduling are rooms; rooms of a service are not, nor are those of the papers."""
    assert [
        room_of(path) for path in ("libs/penstock/errors.py", "libs/penstock/scheduling/order/fair.py")
    ] == [
        "libs/penstock",
        "libs/penstock/scheduling/order",
    ]
    assert room_of("libs/penstock/scheduling/profiles.py") == "libs/penstock/scheduling"
    assert room_of("libs/penstock/ledger/fold/evolve.py") == "libs/penstock/ledger"
    assert room_of("libs/penstock_papers/muri/matching.py") == "libs/penstock_papers"
    assert room_of("services/penstock_services/placer/core/step.py") == "services/penstock_services/placer"


def test_numbers_with_names_are_counted_however_they_are_written() -> None:
    """Two in one line are two; a private one counts; texts, flags, tables and results of functions do not."""
    module = ast.parse(
        "MAX = 1 << 12\n_STEP: float = -0.5\nLOW, HIGH = 1, 2.5\nMEANS = (1, 2)\nAGAIN = 2 * MAX\nROOT = "
        "math.sqrt(2)\n"
        "NAME = 'x'\nON = True\nTABLE = {'a': 1}\nFOUND = read()\nlower = 3\n\ndef f():\n    INNER = 4\n"
    )
    names = ["MAX", "_STEP", "LOW", "HIGH", "MEANS", "AGAIN", "ROOT"]
    assert [constant.name for constant in constants_in(module)] == names


def test_public_names_are_what_other_modules_may_use() -> None:
    """Classes, functions and values without an underscore; not what was imported."""
    module = ast.parse(
        "import os\nA, _B = 1, 2\nC: int = 3\nclass D: ...\ndef e(): ...\nasync def _f(): ...\n"
    )
    assert public_names(module) == {"A", "C", "D", "e"}


def test_a_function_longer_than_a_screen_is_found_even_inside_another_one() -> None:
    """A method of 71 lines, and one of 70 beside it."""
    body = "        x = 1\n"
    source = f"class A:\n    def long(self):\n{body * 70}\n    def fits(self):\n{body * 69}"
    assert list(long_functions(ast.parse(source))) == [(2, "long", 71)]


@pytest.mark.parametrize(
    ("count", "row"), [(0, 0), (7, 7), (49, 49), (101, 102), (1_234, 1_240), (12_701, 12_800)]
)
def test_a_row_is_a_round_number_at_most_two_percent_above(count: int, row: int) -> None:
    """Small counts are exact: a room gets no file in advance."""
    assert rounded(count) == row
    assert row <= count * 1.02


def test_rows_are_written_anew_below_the_comment_and_nothing_else_changes() -> None:
    """After a deletion all rows fall; the tables before and behind stay."""
    page = written(PYPROJECT, {"libs/penstock/log": Size(3_501, 19, 168, 68)})
    assert page == PYPROJECT.replace(
        '"libs/penstock/gone" = [5, 1, 1, 0]', '"libs/penstock/log" = [3_550, 19, 168, 68]'
    )


def test_the_sum_of_all_rooms_has_a_bound_of_its_own() -> None:
    """Each room stays below its rounded row, and together they grow."""
    today = rooms([Source("libs/penstock/log/a.py", "A = 1\n"), Source("libs/penstock/cli/b.py", "B = 2\n")])
    [line] = above(today, {**today, WHOLE: Size(1, 2, 2, 2)})
    assert line.startswith("the product: 2 lines, 1 at most")


def test_the_command_prints_every_room_and_fails_on_one_more_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of a small product are set; then a file grows, and a folder gets a thirteenth file."""
    monkeypatch.setattr(budgets, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    room = tmp_path / "libs/penstock/log"
    room.mkdir(parents=True)
    for number in range(12):
        (room / f"part_{number}.py").write_text("A = 1\n")
    (room / "__init__.py").write_text('"""The log."""\n')
    assert budgets.main(["--write"]) == 0
    assert "libs/penstock/log" in capsys.readouterr().out
    (room / "part_0.py").write_text("A = 1\nB = 2\n")
    assert budgets.main([]) == 1
    assert "13 names" not in capsys.readouterr().out, "what is wrong goes to the standard error"
    (room / "part_0.py").write_text("A = 1\n")
    assert budgets.main([]) == 0
    (room / "part_12.py").write_text("x = 0\n" * 501)
    capsys.readouterr()
    assert budgets.main([]) == 1
    said = capsys.readouterr().err
    assert "libs/penstock/log: 13 files, 12 at most: name sub-folders" in said
    assert "libs/penstock/log/part_12.py: 501 lines, 500 at most" in said
