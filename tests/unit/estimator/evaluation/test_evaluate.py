"""`python -m tests.papers.estimator` on files of measured runs: good runs, odd runs, and other files."""

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    THROUGHPUT,
    UTILISATION,
    UTILISATION_STD,
    Runs,
)
from tests.papers.estimator.__main__ import main
from tests.papers.estimator.files.run_files import BadData, read_runs
from tests.support.trainings import measured_runs as cluster

HEADER = "gpu,num_gpu,workload,precision,batch_cfg,gmem_max_mib,util_mean,util_std,throughput"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small cluster's runs as a file."""
    path = tmp_path_factory.mktemp("data") / "runs.csv"
    path.write_text("\n".join([HEADER, *lines_of(cluster.runs()), ""]))
    return path


def lines_of(runs: Runs) -> list[str]:
    labels = [runs.labels[name] for name in (MEMORY, UTILISATION, UTILISATION_STD, THROUGHPUT)]
    return [
        f"{task.gpu},{task.gpus:.0f},{task.model},{task.precision},{task.batch_size:.0f},"
        + ",".join(f"{column[row]:.6g}" for column in labels)
        for row, task in enumerate(runs.tasks)
    ]


def test_it_shows_figures_for_people_and_for_programs(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator compares our model with Liquid's on his own history; a script reads the same as JSON."""
    command = [str(table), "--model", "liquid", "--model", "linear", "--split", "families"]
    assert main(command) == 0
    predicted = capsys.readouterr().out
    assert predicted.splitlines()[0].split()[:3] == ["label", "model", "R²"]
    assert main([*command, "--seeds", "2", "-o", "json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert (found["split"], found["seeds"], found["runs"]) == ("families", 2, len(cluster.tasks()))
    liquid = found["models"]["liquid"]["gpu_memory_mib"]
    assert set(liquid) == {"r2", "rmse", "mae", "p95_relative", "runs", "coverage", "width"}
    assert liquid["runs"]["mean"] == len(cluster.tasks())
    assert liquid["r2"]["mean"] > found["models"]["linear"]["gpu_memory_mib"]["r2"]["mean"]


def test_our_model_is_judged_on_other_runs_with_its_intervals(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on the history, judged on this week's runs; last week's, which an export has once more, judge
    nothing."""
    other = tmp_path / "week"
    other.mkdir()
    old, lines = table.read_text().splitlines()[1:], lines_of(cluster.runs(seed=1))
    (other / "monday.csv").write_text("\n".join([HEADER, *lines[:70], *old[:9]]))
    (other / "tuesday.csv").write_text("\n".join([HEADER, *lines[70:]]))
    assert main([str(table), "--against", str(other), "--model", "penstock", "-o", "json"]) == 0
    printed = capsys.readouterr()
    assert f"9 runs of {other} are in {table} too and are not asked" in printed.err
    memory = orjson.loads(printed.out)["models"]["penstock"]["gpu_memory_mib"]
    assert memory["r2"]["mean"] > 0.98
    assert memory["runs"]["mean"] == len(lines)
    assert memory["coverage"]["mean"] > 0.8
    assert main([str(table), "--against", str(table), "--model", "linear"]) == 2
    assert f"nothing is left to ask about: {table} has all runs of {table}" in capsys.readouterr().err


def test_bad_runs_are_rejected_with_their_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten good lines and one of each kind of nonsense that broken exporters write."""
    good = [f"V100,{count},bert,FP16,{8 * count},9000,80,10,{100 * count}" for count in (1, 2, 4, 8, 16)] * 2
    bad = {
        "V100,1,bert,FP16,8,40000,80,10,100": "more GPU memory than the card has",
        "V100,1,bert,FP16,8,9000,101,10,100": "utilisation is above 100 %",
        "V100,1,bert,FP16,8,nan,80,10,100": "gpu_memory_mib is not a number",
        "V100,1,bert,FP16,8,9000,80,10,1e999": "throughput is out of all range",
        "V100,1,bert,FP16,8,9000,80,10,-3": "throughput is negative",
        "V100,0,bert,FP16,8,9000,80,10,100": "the number of GPUs is not a whole number ≥ 1",
        "V100,,bert,FP16,8,9000,80,10,100": "the number of GPUs is not a whole number ≥ 1",
        "V100,1,bert,FP16,8,,,,": "nothing was measured",
        "abacus,1,bert,FP16,8,9000,80,10,100": "the GPU is unknown and its memory is not given",
        "V100,1,bert,FP16": "4 fields, the header has 9",
        "V100,1,,FP16,8,9000,80,10,100": "the workload has no name",
    }
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([HEADER, *good, *bad]))
    read = read_runs(path)
    assert len(read.runs) == len(good)
    assert [(one.where, one.reason) for one in read.rejected] == [
        (f"runs.csv:{2 + len(good) + row}", reason) for row, reason in enumerate(bad.values())
    ]
    assert main([str(path), "--model", "linear", "--split", "random"]) == 0
    predicted = capsys.readouterr().err
    assert f"{len(bad)} runs rejected, {len(good)} kept" in predicted
    assert "2 × the number of GPUs is not a whole number ≥ 1 (first: runs.csv:17)" in predicted


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty: a header line was expected"),
        (b"gpu,num_gpu,workload\nV100,1,bert\n", "nothing measured"),
        (b"gpu,gpu_model,num_gpu,workload,util_mean\n", "column 'gpu' stands in the header twice"),
        (HEADER.encode() + b"\n", "there is none below the header"),
        (HEADER.encode() + b"\n\xff\n", "1 × byte 0xff is not UTF-8"),
        (HEADER.encode() + b'\n"V100,1\n', "1 × a quote is not closed"),
        (HEADER.encode() + b"\nV100,1,bert,FP16,8,99999,80,10,1\n", "1 × more GPU memory than the card has"),
    ],
)
def test_what_is_no_table_of_runs_is_refused(
    tmp_path: Path, content: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wrong file, an export that broke off, a header in another language: one line says what is wrong."""
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(BadData, match=r"runs\.csv"):
        read_runs(path)
    assert main([str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_all_that_is_wrong_with_a_command_is_reported_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both files are missing: both are named."""
    assert main([str(tmp_path / "a.csv"), "--against", str(tmp_path / "b.csv")]) == 2
    predicted = capsys.readouterr().err
    assert "a.csv: file: No such file" in predicted
    assert "b.csv: file: No such file" in predicted
    assert main([str(tmp_path)]) == 2
    assert "a folder without a CSV file" in capsys.readouterr().err


def test_columns_that_are_not_looked_at_are_named(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A column whose name we do not know would be missed in silence: "batchsize" is no batch size."""
    lines = table.read_text().splitlines()
    path = tmp_path / "runs.csv"
    path.write_text(
        "\n".join(
            [f"{lines[0].replace('batch_cfg', 'batchsize')},rack", *(f"{line},7" for line in lines[1:])]
        )
    )
    assert main([str(path), "--model", "linear", "--split", "both-precisions", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    assert orjson.loads(out)["columns_not_looked_at"] == ["batchsize", "rack"]
    assert "columns that are not looked at: batchsize, rack" in err


def test_what_belongs_to_step_times_is_refused_for_runs(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that is wrong at once; nothing is taken for something else."""
    assert main([str(table), "--split", "placements", "--model", "genie", "--measured", "15"]) == 2
    predicted = capsys.readouterr().err
    assert "--split placements: of runs, choose cells, both-precisions" in predicted
    assert "--model genie: of runs, choose penstock, liquid" in predicted
    assert "--measured: of step times alone" in predicted


def test_families_need_two_gpu_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster with one kind of GPU cannot tell how its model does on others."""
    path = tmp_path / "runs.csv"
    path.write_text(
        "\n".join([HEADER, "V100,1,bert,FP16,8,9000,80,10,100", "V100,2,bert,FP16,8,9000,80,10,190"])
    )
    assert main([str(path), "--split", "families"]) == 2
    assert "split families: 1 group" in capsys.readouterr().err


def test_it_runs_as_a_process_of_its_own(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What people start: one process, figures on stdout, exit code 2 for bad data."""
    command = [sys.executable, "-m", "tests.papers.estimator", str(table), "--model", "linear", "-o", "json"]
    ran = subprocess.run(command, capture_output=True, check=True)
    assert "linear" in orjson.loads(ran.stdout)["models"]
    assert main(["gone.csv"]) == 2
    assert capsys.readouterr().err == "penstock: gone.csv: file: No such file or directory\n"


def test_phase_times_are_judged_where_a_file_shows_them(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Liquid's second model, and the medians that answer here; a launch of minus one second sets its run
    aside."""
    large = ("bert", "vgg16", "resnet50")
    lines = table.read_text().splitlines()
    rows = [f"{lines[0]},launch_s,train_s,save_s,input_mib"]
    for number, line in enumerate(lines[1:]):
        longer = 3 * (line.split(",")[2] in large)
        rows.append(f"{line},{5 + longer + number % 2 / 10},{0.1 + longer},{2 + longer},{1_000 * longer}")
    rows[3] = f"{lines[3]},-1,1,1,0"
    path = tmp_path / "phases.csv"
    path.write_text("\n".join(rows))
    assert main([str(path), "--split", "random", "--model", "liquid", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    found = orjson.loads(out)["models"]["liquid"]
    assert {"launch_s", "train_s", "save_s", MEMORY} <= set(found)
    assert found["launch_s"]["r2"]["mean"] > 0.8
    assert found["launch_s"]["runs"]["mean"] == len(lines) - 2
    assert "1 × launch_s is out of all range (first: phases.csv:4)" in err


def test_each_gpu_model_is_left_out_alone(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator who buys a new card asks how far estimates on it may be off: a row for each card that he
    has."""
    assert main([str(table), "--left-out", "--split", "families", "-o", "json"]) == 0
    groups = orjson.loads(capsys.readouterr().out)["groups"]
    memory = [row for row in groups if row["label"] == MEMORY]
    assert {row["group"] for row in memory} == set(cluster.GPUS)
    assert sum(row["asked"] for row in memory) == len(cluster.tasks())
    assert min(row["inside"] for row in memory) >= 0.88
    assert main([str(table), "--left-out"]) == 2
    assert "choose families or generations or networks" in capsys.readouterr().err


def test_a_comparison_of_nothing_is_refused(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other file measured the network's bandwidth alone, and no run of the history did."""
    other = tmp_path / "other.csv"
    other.write_text("gpu,num_gpu,workload,bandwidth_mbps\nV100,1,bert,90\nV100,2,bert,80\n")
    assert main([str(table), "--against", str(other), "--model", "linear"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "nothing that both measured" in err


def test_repeats_of_too_few_cells_show_no_ceiling(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run stands twice in the file: that is no figure of how far repeats are apart."""
    header, *rows = table.read_text().splitlines()
    few = tmp_path / "few.csv"
    unlike = {(row.split(",")[0], *row.split(",")[1:4]): row for row in rows}
    few.write_text("\n".join([header, *unlike.values(), rows[0]]))
    assert main([str(few), "--model", "linear"]) == 0
    assert "repeats" not in capsys.readouterr().out
