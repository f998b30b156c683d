"""Stories of the command that makes the papers' tables: what it prints, writes and ends with."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.papers import parallel_runs, tables
from tests.papers.parallel_runs import simulated
from tests.papers.tables import PaperTable, Row, main


@simulated(1.0)
def doubled(number: int) -> float:
    return 2.0 * number


def made() -> Iterator[PaperTable]:
    """One row that is reached, one that is short by what was simulated, one that is only shown."""
    rows = [Row("enough", doubled(2), 3.9, (3.0, 5.0), reach=4.0), Row("too few", doubled(1), 3.0, reach=3.0)]
    yield PaperTable("counts", "Counts", "pieces", [*rows, Row("shown", doubled(3))], "A note.")


def long() -> Iterator[PaperTable]:
    """the long one"""
    yield PaperTable("long", "Long", "pieces", [Row("as published", 1.009, 1.0, within=0.01)])


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No results of other tests, nothing known to be short, and a folder for the data."""
    monkeypatch.setattr(parallel_runs, "_found", {})
    monkeypatch.setattr(tables, "KNOWN", {})
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr("sys.argv", ["tables", *arguments])
    with pytest.raises(SystemExit) as end:
        main("tests.unit.tables", made, long=long)
    return end.value.code


def test_a_row_that_is_short_is_named_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody changes a policy; one of the figures falls below what it has to reach."""
    assert ended(monkeypatch) == 1
    out, err = capsys.readouterr()
    assert "≥ 4 ✓" in out
    assert "≥ 3 ✗" in out
    assert "short, and not in known_short.py: counts: too few" in err
    assert "counts; left: 0 tables, 0 simulations" in err
    assert "test_paper_tables.doubled: 3 simulations" in err


def test_a_row_that_is_known_to_be_short_does_not_fail_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        tables, "KNOWN", {"two are all there are": ("counts: too few", "long: not made here")}
    )
    assert ended(monkeypatch) == 0
    assert "short: counts: too few: two are all there are" in capsys.readouterr().err


def test_a_row_that_is_not_short_any_more_fails_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the reason would stay for ever, and hide that the row falls back."""
    monkeypatch.setattr(tables, "KNOWN", {"a reason": ("counts: too few", "counts: enough")})
    assert ended(monkeypatch) == 1
    assert "not short any more, take it out of known_short.py: counts: enough" in capsys.readouterr().err


def test_figures_and_page_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures, page = tmp_path / "papers.json", tmp_path / "papers.html"
    ended(monkeypatch, "--json", str(figures), "--page", str(page))
    [(key, table)] = json.loads(figures.read_text()).items()
    assert key == "counts"
    assert [row["reached"] for row in table["rows"]] == [True, False, None]
    assert table["rows"][0]["interval"] == [3.0, 5.0]
    assert "too few" in page.read_text()


def test_other_tables_are_made_in_place_of_these(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--long` beside a published figure that has to come out to a hundredth."""
    assert ended(monkeypatch, "--long") == 0
    out = capsys.readouterr().out
    assert "± 1 % ✓" in out
    assert "Counts" not in out


def test_without_the_data_it_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "nothing"))
    assert ended(monkeypatch) == 2
    assert "set PENSTOCK_DATA to the folder that holds muri/" in capsys.readouterr().err


def test_a_table_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is there, one of the data sets is not."""
    monkeypatch.setattr("sys.argv", ["tables"])

    def lacks() -> Iterator[PaperTable]:
        yield PaperTable("idle", "Idle", "s", [Row(f"{len(kinds())} kinds", 1.0)])

    from tests.papers.liquid.idle_tables import kinds

    kinds.cache_clear()
    with pytest.raises(SystemExit) as end:
        main("tests.unit.tables", lacks)
    assert end.value.code == 2
    assert "PENSTOCK_DATA" in capsys.readouterr().err
