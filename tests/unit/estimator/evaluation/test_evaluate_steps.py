"""`python -m tests.papers.estimator` on tables of step times: a cluster's own profile runs, and files that
are none."""

import math
from pathlib import Path

import numpy as np
import orjson
import pytest

from penstock_services.estimator.core.records.placements import Cell, Measurement, Table, table
from penstock_services.estimator.core.step_time.prior import WIDE
from tests.papers.estimator.__main__ import main
from tests.papers.estimator.files.run_files import BadData
from tests.papers.estimator.files.step_files import holds_steps, read_steps
from tests.papers.estimator.step_validation import (
    Predicted,
    errors,
    genies_light,
    light,
    noise,
    share_of,
    without,
)

SHAPES = ("1", "2", "4", "11", "22", "12", "44", "111", "222", "444", "1111", "2222")
BATCHES = (8, 16, 32, 64, 128)
HEADER = "placement,local_bsz,step_time"
SCATTER = 0.02


def step_s(shape: str, batch: float, sync_s: float) -> float:
    """Computing, and synchronising that takes longer on more nodes."""
    return 0.05 + 0.01 * batch + (sync_s * len(shape) ** 0.3 if shape != "1" else 0.0)


def lines(sync_s: float, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [
        f"{shape},{batch},{step_s(shape, batch, sync_s) * math.exp(rng.normal(0, SCATTER)):.6g}"
        for shape in SHAPES
        for batch in BATCHES
    ]


def whole(sync_s: float = 0.2) -> Table:
    rows = [line.split(",") for line in lines(sync_s)]
    return table(Measurement(Cell(tuple(map(int, p)), float(b)), float(s)) for p, b, s in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two networks, each in its folder as Pollux lays them out, beside tables of something else."""
    for name, sync_s in (("bert", 0.2), ("vgg16", 0.6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "placements.csv").write_text("\n".join([HEADER, *lines(sync_s), ""]))
        (tmp_path / name / "validation-8.csv").write_text("epoch,loss\n1,2.5\n")
    return tmp_path


def test_each_network_is_judged_by_each_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A light profile of 12 cells and half of all: ours is near the noise, GENIE's form is of even shapes.

    Of ours with 12 cells p95 is 0.058 ± 0.0085, relative to the forest's 0.16 ± 0.04 (25 draws). With half of
    them, drawn at random, it depends on which: up to 0.32.
    """
    command = [str(folder), "--measured", "12", "--measured", "0.5", "-o", "json"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    found = orjson.loads(out)
    assert (found["kind"], found["cells"]) == ("steps", {"bert": 60, "vgg16": 60})
    assert "2 CSV files are no tables" in err
    for text, cells in (("12", 48), ("0.5", 30)):
        ours, forest = found["measured"][text]["penstock"], found["measured"][text]["forest"]
        assert set(ours["networks"]) == {"bert", "vgg16"}
        assert ours["networks"]["bert"]["cells"]["mean"] == cells
        assert ours["pooled"]["cells"]["mean"] == 2 * cells
        if text == "12":
            assert ours["pooled"]["p95"]["mean"] < min(0.10, forest["pooled"]["p95"]["mean"])
    assert 0 < found["measured"]["0.5"]["genie"]["networks"]["bert"]["cells"]["mean"] < 30
    assert 0 < found["noise"]["pooled"]["median"] < 2 * SCATTER, "0.73 ± 0.16 times it"


def test_one_part_of_the_measurements_is_judged_by_the_other(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last month's table tells this month's placements; a table says by itself which network it is of."""
    month = tmp_path / "of/this/month.csv"
    month.parent.mkdir(parents=True)
    rows = [f"bert,{line}" for line in lines(0.2, seed=1) if line.startswith(("44,", "222,"))]
    month.write_text("\n".join([f"model,{HEADER}", *rows, f"bert,{lines(0.2)[0]}"]))
    known = folder / "bert/placements.csv"
    stored = [line for line in known.read_text().splitlines() if not line.startswith(("44,", "222,"))]
    known.write_text("\n".join(stored))
    assert main([str(folder), "--against", str(month), "--model", "penstock"]) == 0
    out, err = capsys.readouterr()
    assert "bert: 1 cells of" in err
    row = next(line.split() for line in out.splitlines() if "network bert" in line and "penstock" in line)
    assert row[0] == "all"
    assert row[-1] == str(len(rows))


def test_bad_measurements_are_rejected_with_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hung step, a clock that stood still, a node without GPUs: counted by reason, and the columns that
    nobody reads named."""
    bad = ("22,8,0", "22,8,nan", "22,8,1e9", "2-0,8,1", "two,8,1", "22,-8,1", "22,8")
    path = tmp_path / "bert.csv"
    path.write_text("\n".join([f"{HEADER},sync_time", *(f"{x},0" for x in (*lines(0.2), *bad))]))
    steps = read_steps(path)
    assert len(steps.rejected) == len(bad)
    assert [one.where for one in steps.rejected] == [f"bert.csv:{62 + row}" for row in range(len(bad))]
    assert list(steps.tables) == ["bert"]
    assert main([str(path), "--measured", "0.5", "--model", "forest"]) == 0
    predicted = capsys.readouterr().err
    assert f"{len(bad)} measurements rejected, 60 kept" in predicted
    assert "1 × step_time_s is not a number (first: bert.csv:63)" in predicted
    assert "columns that are not looked at: sync_time" in predicted


def test_absurd_but_possible_sizes_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches at the edge of what is accepted: nothing overflows, nobody crashes."""
    rows = [
        f"{shape},{batch},{step}"
        for shape in ("1", "22", "44")
        for batch, step in ((1, 1e-6), (2**31, 86400))
    ]
    path = tmp_path / "odd.csv"
    path.write_text("\n".join([HEADER, *rows, "1,0.001,3", "2,5e-300,3"]))
    assert (
        main(
            [
                str(path),
                "--measured",
                "0.5",
                "--measured",
                "3",
                "--split",
                "placements",
                "-o",
                "json",
            ]
        )
        == 0
    )
    assert orjson.loads(capsys.readouterr().out)["cells"] == {"odd": 8}


def test_nodes_of_any_size_have_a_spelling(tmp_path: Path) -> None:
    """ "12" is two nodes, as in Pollux' tables; "12-" is one of twelve GPUs."""
    path = tmp_path / "dgx.csv"
    path.write_text("placement,local_batch,step_s\n12,8,1\n12-,8,1\n16-16,8,1\n")
    assert {cell.placement for cell in read_steps(path).tables["dgx"].cells} == {(1, 2), (12,), (16, 16)}


def test_what_cannot_be_judged_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of other tables, a wrong column, options of the other kind; too few cells to hold any back."""
    (tmp_path / "loss.csv").write_text("epoch,loss\n1,2\n")
    assert not holds_steps(tmp_path)
    with pytest.raises(BadData, match="without a table"):
        read_steps(tmp_path)
    few = tmp_path / "few.csv"
    few.write_text("placement,step_time\n1,1\n")
    command = [str(few), "--split", "families", "--model", "liquid", "--measured", "1.5"]
    assert main(command) == 2
    predicted = capsys.readouterr().err
    for problem in ("no column local_bsz", "--split families", "--model liquid", "--measured 1.5"):
        assert problem in predicted
    few.write_text("\n".join([HEADER, *lines(0.2)[:12]]))
    assert main([str(few), "--measured", "15"]) == 2
    assert "12 cells are too few to measure 15" in capsys.readouterr().err


def test_nothing_that_was_shown_is_asked() -> None:
    """Each way of measuring gives other cells than those that are judged; whole placements are held out
    whole."""
    all_cells, rng = whole(), np.random.default_rng(0)
    for shown in (
        light(all_cells, WIDE, 7, rng),
        genies_light(all_cells, 9),
        share_of(all_cells, 0.5, "cells", rng),
        share_of(all_cells, 0.5, "placements", rng),
    ):
        rest = without(all_cells, shown)
        assert not set(rest.cells) & set(shown.cells)
        assert len(rest.cells) + len(shown.cells) == len(all_cells.cells)
    assert not {cell.placement for cell in shown.cells} & {cell.placement for cell in rest.cells}
    assert len(light(all_cells, WIDE, 7, rng).cells) == 7


def test_genies_profile_is_batches_nodes_and_gpus() -> None:
    """B + N + G runs: batches on one GPU, then two to four nodes and GPUs at the middle one, as far as they
    exist."""
    shapes = [cell.placement for cell in genies_light(whole(), 9).cells]
    assert shapes.count((1,)) == 3
    assert set(shapes) == {(1,), (2,), (4,), (1, 1), (1, 1, 1), (1, 1, 1, 1)}


def test_noise_is_that_of_one_measurement() -> None:
    """A straight curve with 2 % scatter has a median deviation of 0.67 × 2 %; without scatter it has none.

    Of 320 cells it is off by 7.9 % (25 draws), of ten times as many by 2.5 %: the bound is six times that.
    """
    cells = [Cell((gpus,), 8.0 * power) for gpus in range(1, 81) for power in range(40, 0, -1)]
    straight = np.log([0.05 + 0.01 * cell.local_batch for cell in cells])
    rough = straight + np.random.default_rng(0).normal(0, SCATTER, len(cells))
    ones = np.ones(len(cells))
    assert noise(Table(tuple(cells), straight, ones)) == pytest.approx(0, abs=1e-9)
    assert np.median(noise(Table(tuple(cells), rough, ones))) == pytest.approx(0.67 * SCATTER, rel=0.15)


def test_a_model_without_place_for_a_cell_is_not_judged_there() -> None:
    """GENIE on (1, 2): left out. GENIE where its quadratic falls below zero: endlessly wrong, and said so."""
    truth = Table((Cell((1, 2), 8), Cell((2,), 8)), np.zeros(2), np.ones(2))
    found = errors(Predicted(np.array([math.nan, math.inf]), np.array([math.nan, math.nan])), truth)
    assert found.relative.tolist() == [math.inf]


def test_tables_of_several_gpu_models_are_judged_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file of a cluster with two kinds of GPUs, one three times as fast: no mean of both, and neither
    teaches the other's prior."""
    path = tmp_path / "cluster.csv"
    rows = [f"bert,V100,{line}" for line in lines(0.2)]
    slow = [(*line.rsplit(",", 1),) for line in lines(0.2, seed=1)]
    rows += [f"bert,K80,{cell},{3 * float(step_s):.6g}" for cell, step_s in slow]
    path.write_text("\n".join([f"model,gpu,{HEADER}", *rows]))
    steps = read_steps(path)
    assert {name: len(one.cells) for name, one in steps.tables.items()} == {
        "bert on K80": 60,
        "bert on V100": 60,
    }
    assert set(steps.networks.values()) == {"bert"}
    assert not steps.ignored
    assert main([str(path), "--measured", "15", "--model", "penstock", "-o", "json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    ours = found["measured"]["15"]["penstock"]["networks"]
    assert set(ours) == {"bert on K80", "bert on V100"}
    assert max(one["median"]["mean"] for one in ours.values()) < 0.2


def test_a_comparison_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This month's table holds only cells that are in last month's: nothing is left to ask about."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "bert.csv").write_text("\n".join([HEADER, *lines(0.2)]))
    assert main([str(old), "--against", str(new), "--model", "forest"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "nothing is left to ask about" in err


def test_noise_of_too_few_neighbours_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two batch sizes of each placement have no third between them."""
    path = tmp_path / "bert.csv"
    rows = [line for line in lines(0.2) if line.split(",")[1] in ("8", "16")]
    path.write_text("\n".join([HEADER, *rows]))
    assert main([str(path), "--measured", "0.5", "--model", "forest"]) == 0
    assert "noise" not in capsys.readouterr().out
    assert main([str(path), "--measured", "0.5", "--model", "forest", "-o", "json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert found["noise"] == {"networks": {}}
