"""`penstock traces`: what is here, what it is like, and as our own CSV."""

from pathlib import Path

import orjson
import pytest

from penstock.cli.app import run as main
from penstock.simulator.traces.files.importing import read_trace

MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    "resource_time_0,resource_time_1,resource_time_2,priority\n"
    "7,4,1500,100,bert,4,7200000,0,190,0.5,163,18,1\n8,1,3601500,9,gpt2,8,3600000,0,190,0.5,163,18,1\n"
)
HELIOS = (
    "id,gpu_num,gpu_job_num,avg_run_time_gpu,avg_gpu_num,med_run_time_gpu,complete_gpu_time,"
    "cancel_gpu_time,fail_gpu_time\n"
    "Venus,1022,125303,13040,6.736,204,6373315670,4920266598,1052030340\n"
    "Earth,997,427148,5130,2.101,234,5713038873,4793853520,932310362\n"
    "total,2019,552451,6000,3,220,12086354543,9714120118,1984340702\n"
)
TSV = "A3C\tx\td\t--n\t1\t7\t{}\t1\t-1\t0\n"


@pytest.fixture(autouse=True)
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe has no width, though a parallel test run claims one for it."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of data sets of which some are here, and one is broken."""
    for name in ("muri/trace-data", "gavel/traces", "helios"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "muri/trace-data/trace1.csv").write_text(MURI)
    (tmp_path / "muri/trace-data/job_type_1.csv").write_text("no trace\n")
    (tmp_path / "gavel/traces/small.trace").write_text(TSV.format(2))
    (tmp_path / "gavel/traces/torn.trace").write_text(TSV.format("two"))
    (tmp_path / "helios/helios_cluster_summary.csv").write_text(HELIOS)
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    return tmp_path


def test_ls_lists_what_is_here_and_what_cannot_be_read(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A colleague's copy of the data lacks most sets, and one file broke on the way: it is named, and the
    rest listed."""
    assert main(["traces", "ls", "-o", "json"]) == 1
    found = orjson.loads(capsys.readouterr().out)
    assert (found["data"], found["data_from"]) == (str(data), f"PENSTOCK_DATA={data}")
    assert [(one["trace"], one["jobs"], one["problem"]) for one in found["traces"]] == [
        ("muri/trace1", 2, None),
        ("gavel/small", 1, None),
        ("gavel/torn", None, "line 1, column scale_factor: 'two' is not a whole number ≥ 1"),
    ]
    assert (found["traces"][0]["format"], found["traces"][0]["span_s"], found["traces"][0]["gpu_hours"]) == (
        "muri",
        3_600,
        9,
    )
    assert found["summaries"] == ["helios"]
    assert main(["traces", "ls"]) == 1
    text = capsys.readouterr().out
    assert "muri/trace1" in text
    assert "job_type" not in text
    assert "helios: only sums over clusters" in text


def test_ls_without_data_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new machine: no data sets, but the generators are always there."""
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "gone"))
    assert main(["traces", "ls"]) == 0
    text = capsys.readouterr().out
    assert f"there is no folder PENSTOCK_DATA={tmp_path / 'gone'}" in text
    assert "poisson/10-per-hour" in text


def test_describe_reports_sizes_times_and_the_load(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a night of simulations: does this trace load that cluster at all, and does all of it fit?"""
    assert main(["traces", "describe", "muri/trace1", "--cluster", "1x2", "-o", "json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert (found["jobs"], found["first_s"], found["span_s"], found["gpu_hours"]) == (2, 1.5, 3_600, 9)
    assert found["run_s"]["percentiles"]["p50"] in (3_600, 7_200)
    assert found["sizes"] == [
        {"gpus": "1", "jobs": 1, "gpu_hours": 1.0},
        {"gpus": "4", "jobs": 1, "gpu_hours": 8.0},
    ]
    assert found["models"] == {"bert": 1, "gpt2": 1}
    assert found["left_out"] == ["interval", "priority"]
    assert found["load"] == {"cluster": "1x2", "gpus": 2, "asked": 2.5, "work": 4.5, "misfits": 1}
    assert main(["traces", "describe", "muri/trace1", "--cluster", "1x2"]) == 0
    text = capsys.readouterr().out
    assert "work 450.0% of its GPUs over the span" in text
    assert "1 jobs can never run there" in text
    assert main(["traces", "describe", "gavel/small"]) == 0
    assert "not given: a job model" in capsys.readouterr().out


def test_sums_are_shown_and_jobs_are_sampled_only_where_they_suffice(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Helios publishes enough of its clusters to sample jobs with the same sums; Acme does not, and none are
    made up."""
    assert main(["traces", "describe", "helios"]) == 0
    text = capsys.readouterr().out
    assert "Venus" in text
    assert "jobs are sampled with these sums as helios/Venus, helios/Earth" in text
    assert main(["traces", "describe", "helios/Earth", "-o", "json"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert (found["jobs"], found["format"]) == (20_000, "generated")
    assert main(["simulate", "helios/Pluto"]) == 2
    assert "no such cluster; there are helios/Venus, helios/Earth" in capsys.readouterr().err
    assert main(["simulate", "acme/Seren"]) == 2
    assert "only sums over whole clusters are here, no jobs" in capsys.readouterr().err


def test_convert_says_what_is_left_out(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace for a colleague's spreadsheet: milliseconds become seconds, stage times have no column."""
    out = tmp_path / "ours.csv"
    assert main(["traces", "convert", "muri/trace1", "--to", "csv", "-o", str(out)]) == 0
    text = capsys.readouterr().err
    assert text == "penstock: 2 jobs written; left out: interval, priority, the stage times of 2 jobs\n"
    before = read_trace(data / "muri/trace-data/trace1.csv").jobs
    assert [job._replace(stages=None) for job in before] == list(read_trace(out).jobs)
    assert main(["traces", "convert", "poisson/10-per-hour", "--seed", "3", "-o", str(out)]) == 0
    assert "nothing left out" in capsys.readouterr().err
    assert main(["traces", "convert", "gavel/torn", "-o", str(out)]) == 2
    assert main(["traces", "convert", "muri/trace1", "-o", str(tmp_path)]) == 2
