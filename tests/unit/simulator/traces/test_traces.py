"""Malformed traces: everything that is wrong with them is reported, with line and column."""

import subprocess
from pathlib import Path

import orjson
import pytest

from penstock.runtime.files.csv_import import SPANS, TIMES, BadFile
from penstock.simulator.traces.cluster import BadCluster, nodes_of
from penstock.simulator.traces.files.importing import locate, read_trace
from penstock.simulator.traces.fitting import ClusterCapacity
from penstock.simulator.traces.jobs import shape_of
from tests.support.cli.command_line import penstock
from tests.support.cli.command_process import run
from tests.unit.simulator.traces.bad_traces import problems

HEADER = "job_id,submit_s,duration_s,gpus\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


def test_a_plain_trace(trace: Path) -> None:
    """A user's own spreadsheet, saved with a byte order mark and a column nobody asked for."""
    trace.write_text(
        "\ufeff" + "job_id,gpus,submit_s,duration_s,remark\nb,2,10.5,60,x\n\na,1,0,1e3,\n", "utf-8"
    )
    read = read_trace(trace)
    assert [(job.job_id, job.submit_s, job.duration_s, job.gpus) for job in read.jobs] == [
        ("a", 0.0, 1_000.0, 1),
        ("b", 10.5, 60.0, 2),
    ]
    assert read.format == "csv"


def test_all_problems_are_told_not_only_the_first(trace: Path) -> None:
    """Somebody exports 80,000 rows and would rather not find the faults one by one."""
    text = (
        HEADER
        + "a,0,60,1\nb,-5,60,1\nc,1,zero,1\nd,2,0,1\na,3,60,1\ne,4,60,1.5\nf,5,nan,0\ng,6,60\n b c,7,60,1\n"
    )
    assert problems(trace, text) == [
        f"line 3, column submit_s: '-5' is no time: {TIMES}",
        f"line 4, column duration_s: 'zero' is not a length of time: {SPANS}",
        "line 5, column duration_s: 0 must be more than 0",
        "line 6: job a stands already in line 2",
        "line 7, column gpus: '1.5' is not a whole number ≥ 1",
        f"line 8, column duration_s: 'nan' is not a length of time: {SPANS}",
        "line 8, column gpus: 0 is less than 1",
        "line 9: 3 fields, the header has 4",
        "line 10, column job_id: 'b c' is not a name of letters, digits and . _ : / -",
    ]


def test_bad_lines_can_be_left_out_and_are_counted(trace: Path) -> None:
    """One torn line in a month of data must not stop an evaluation, but must not vanish either."""
    trace.write_text(HEADER + "a,0,60,1\nb,0,60,999\nc,x,60,1\n")
    read = read_trace(trace, fits=ClusterCapacity(nodes_of("1x8")).problems, skip_bad=True)
    assert [job.job_id for job in read.jobs] == ["a"]
    assert [str(problem) for problem in read.skipped] == [
        "line 3, column gpus: 999 GPUs; the whole cluster has 8",
        f"line 4, column submit_s: 'x' is no time: {TIMES}",
    ]


def test_a_name_that_comes_again_is_told_though_the_first_line_is_bad_as_well(trace: Path) -> None:
    """Whoever repairs the file wants to do it once: with bad lines left out, neither job is taken for the
    other."""
    trace.write_text(HEADER + "a,0,60,999\na,1,60,1\nb,2,60,1\n")
    read = read_trace(trace, fits=ClusterCapacity(nodes_of("1x8")).problems, skip_bad=True)
    assert [job.job_id for job in read.jobs] == ["b"]
    assert str(read.skipped[1]) == "line 3: job a stands already in line 2"


def test_a_column_with_a_slip_in_its_name_is_not_passed_over_in_silence(trace: Path) -> None:
    """`gpu_model` for `gpu_models`: the job would run on any card, and nobody would know why."""
    trace.write_text("job_id,submit_s,duration_s,gpus,gpu_model,remark\na,0,60,1,V100,x\n")
    read = read_trace(trace)
    assert read.left_out == ["gpu_model", "remark"]
    assert read.likely == {"gpu_model": "gpu_models"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "file: empty: a header line was expected"),
        (b"\n\n", "file: empty: a header line was expected"),
        (HEADER.encode(), "file: no job in it"),
        (b"job_id,submit_s,gpus\na,0,1\n", "line 1, column duration_s: missing (format csv)"),
        (b"job_id,submit_s,duration_s,gpus,gpus\n", "line 1, column gpus: stands in the header twice"),
        (HEADER.encode() + b"a,0,60,1\nb,0,6\xe9,1\n", "line 3, column duration_s: byte 0xe9 is not UTF-8"),
        (HEADER.encode() + b"a,0,60,\x00\n", "line 2, column gpus: a NUL character"),
        (HEADER.encode() + b'a,0,"60,1\n', "line 2: a quote is not closed"),
        (
            HEADER.encode() + b"a" * 300 + b",0,60,1\n",
            f"line 2, column job_id: '{'a' * 40}' …: 300 characters, at most 113",
        ),
        (HEADER.encode() + b"a,1e300,60,1\n", "line 2, column submit_s: 1e300 is out of all range"),
    ],
)
def test_files_that_are_no_traces(trace: Path, text: bytes, message: str) -> None:
    """A spreadsheet saved in the wrong encoding, an empty download, a torn quote."""
    assert problems(trace, text)[0] == message


def test_formats_are_told_by_their_header(trace: Path) -> None:
    """Philly's dates count from the first job, Muri's times are milliseconds."""
    trace.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-09 06:01:55,5,8,40,11cb48\n"
    )
    read = read_trace(trace)
    assert read.format == "philly"
    assert [(job.job_id, job.submit_s, job.owner) for job in read.jobs] == [
        ("philly-2", 0.0, "11cb48"),
        ("philly-1", 3_600.0, "11cb48"),
    ]
    trace.write_text(
        "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
        "resource_time_0,resource_time_1,resource_time_2,priority\n"
        "7,4,1500,100,bert,4,20000,0,190,0.5,163,18,1\n"
    )
    [job] = read_trace(trace).jobs
    assert (job.job_id, job.submit_s, job.duration_s, job.gpus, job.iterations) == ("7", 1.5, 20.0, 4, 100)
    assert job.stages is not None
    assert (job.stages.iteration_ms, job.stages.storage_cpu_ms, job.stages.network_ms) == (190, 0.5, 18)


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal names what there is instead."""
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path))
    with pytest.raises(BadFile, match="no such file, and no trace of a data set"):
        locate("nowhere.csv")
    with pytest.raises(BadFile, match="no such trace; there are none"):
        locate("muri/trace99")
    (tmp_path / "muri/trace-data").mkdir(parents=True)
    (tmp_path / "muri/trace-data/trace3.csv").write_text(HEADER)
    with pytest.raises(BadFile, match="there are trace3"):
        locate("muri/trace99")
    assert locate("muri/trace3").name == "trace3.csv"
    monkeypatch.setenv("PENSTOCK_DATA", str(tmp_path / "gone"))
    with pytest.raises(BadFile, match="set PENSTOCK_DATA"):
        locate("muri/trace3")


@pytest.mark.parametrize("text", ["", "8", "8x", "0x8", "8x17", "8x8+", "99999x8", "8 x 8", "-1x8"])
def test_clusters_that_do_not_exist(text: str) -> None:
    with pytest.raises(BadCluster):
        nodes_of(text)


def test_gangs_have_equal_workers() -> None:
    """16 GPUs on nodes of eight are two workers; twelve are two of six; seven on nodes of four are seven of
    one."""
    assert shape_of(4, 8) == (1, 4)
    assert shape_of(16, 8) == (2, 8)
    assert shape_of(12, 8) == (2, 6)
    assert shape_of(7, 4) == (7, 1)
    assert [len(node.gpus) for node in nodes_of("2x4+1x8")] == [4, 4, 8]


def simulate(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return run("simulate", *arguments)


def test_the_command_tells_figures_and_nothing_else_on_stdout(trace: Path, tmp_path: Path) -> None:
    """A CI job pipes the figures into its own report, and keeps the ledger as evidence."""
    trace.write_text(HEADER + "a,0,60,4\nb,10,60,4\nc,x,1,1\n")
    ledger = tmp_path / "ledger.jsonl"
    options = ("--cluster", "1x4", "--profile", "srtf", "-o", "json", "--skip-bad", "--ledger", str(ledger))
    done = simulate(str(trace), *options)
    assert done.returncode == 0, done.stderr
    found = orjson.loads(done.stdout)
    assert (found["avg_jct_s"], found["makespan_s"], found["finished_jobs"]) == (85.0, 120.0, 2)
    assert found["skipped_lines"] == 1
    assert "skipped line 4, column submit_s" in done.stderr
    lines = ledger.read_bytes().splitlines()
    assert len(lines) == found["records"]
    assert orjson.loads(lines[-1])["seq"] == found["records"]
    assert found["ledger_hash"] == orjson.loads(simulate(str(trace), *options).stdout)["ledger_hash"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "fastest"), "'fastest' is not a profile; there are"),
        (("--truth", "mine"), "'mine' is not a job model; there are bandwidth, colocation"),
        (("--truth", "muri"), "job model muri needs stage times"),
        (("--cluster", "8"), "is not <nodes>x<GPUs per node>"),
        (("--set", "backfill_window=none"), "the value is not JSON"),
        (("--set", "backfill_window=0"), "settings: backfill_window"),
        (("--set", "colour=1"), "NAME=VALUE"),
        (("--stop-latency", "-1"), "--stop-latency: between 0"),
        (("--cluster", "1x2"), "line 2, column gpus: 4 GPUs; the whole cluster has 2"),
    ],
)
def test_bad_commands_are_answered_with_what_would_be_good(
    trace: Path, options: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(HEADER + "a,0,60,4\n")
    assert penstock("simulate", str(trace), *options) == 2
    printed = capfd.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_what_the_lines_the_cluster_and_the_truth_refuse_is_told_in_one_go(trace: Path) -> None:
    """Three kinds of faults in one file: nobody should have to start the simulator three times to find
    them."""
    trace.write_text(
        "job_id,submit_s,duration_s,gpus,gpu_models\n"
        "good,0,60,4,\nuntold,0,,4,\nbroken,x,60,4,\nwide,0,60,9,\nother,0,60,1,H100\n"
    )
    messages = [
        "line 3, column duration_s: job model constant needs run times",
        f"line 4, column submit_s: 'x' is no time: {TIMES}",
        "line 5, column gpus: 9 GPUs; the whole cluster has 8",
        "line 6, column gpu_models: no node has H100; there are GPU",
    ]
    refused = simulate(str(trace), "--cluster", "1x8")
    assert refused.returncode == 2
    lines = refused.stderr.splitlines()
    assert len(lines) == len(messages)
    assert all(what in line for what, line in zip(messages, lines, strict=True))
    done = simulate(str(trace), "--cluster", "1x8", "--skip-bad", "-o", "json")
    assert done.returncode == 0
    found = orjson.loads(done.stdout)
    assert (found["finished_jobs"], found["skipped_lines"]) == (1, 4)
    assert "4 lines left out, with 4 problems" in done.stderr
