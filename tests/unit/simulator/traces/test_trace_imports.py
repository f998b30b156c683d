"""Data that people bring: times and numbers of every usual form, foreign columns, exports of batch
systems."""

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.files.batch_systems import SACCT_COMMAND
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.jobs import TraceJob
from tests.support.cli.command_line import penstock
from tests.unit.simulator.traces.bad_traces import problems, simulated
from tests.unit.simulator.traces.test_trace_imports_json import kubernetes_job

HEADER = "job_id,submit_s,duration_s,gpus\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


# ------------------------------------------------------------------------------------------------ times


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1507532515", "1507532575"),
        ("1507532515000", "1507532575000"),
        ("1.507532515e9", "1507532575.0"),
        ("2017-10-09 07:01:55", "2017-10-09 07:02:55"),
        ("2017-10-09T07:01:55Z", "2017-10-09T09:02:55+02:00"),
        ("2017/10/09 07:01:55", "2017-10-09 07:02:55 UTC"),
        ("0-00:00:00", "0-00:01:00"),
        ("00:00:00", "00:01:00"),
        ("0 days 00:00:00", "0 days 00:01:00"),
        ("0", "60"),
    ],
)
def test_times_of_every_usual_form_count_from_the_first_job(
    trace: Path, capfd: pytest.CaptureFixture[str], first: str, second: str
) -> None:
    """A database's epoch seconds gave a makespan of 48 years at a utilisation of 0 %, without a word."""
    trace.write_text(f"{HEADER}a,{first},00:02:00,8\nb,{second},120,8\n")
    found = simulated(capfd, trace, "--cluster", "1x8")
    assert (found["makespan_s"], found["gpu_utilisation"]) == (240.0, 1.0)
    assert found["avg_jct_s"] == 150.0


def test_seconds_from_the_start_of_a_trace_stay_as_they_are(trace: Path) -> None:
    """A trace that begins with an idle minute has that minute in all figures."""
    trace.write_text(f"{HEADER}a,60,1-02:03:04,1\nb,01:00:00,1 day 00:00:01.5,1\n")
    assert [(job.submit_s, job.duration_s) for job in read_trace(trace).jobs] == [
        (60.0, 93_784.0),
        (3_600.0, 86_401.5),
    ]


def test_a_line_whose_time_is_of_another_kind_is_bad(trace: Path) -> None:
    """A job without a submission time was exported with 0 among epoch seconds: 54 years before all others."""
    trace.write_text(f"{HEADER}a,1700000000,60,1\nb,0,60,1\nc,1700000060,60,1\n")
    message = (
        "line 3, column submit_s: 0 counts from the start of the trace; other lines have a date or an epoch"
    )
    with pytest.raises(BadFile) as caught:
        read_trace(trace)
    assert [str(problem) for problem in caught.value.problems] == [message]
    read = read_trace(trace, skip_bad=True)
    assert [(job.job_id, job.submit_s) for job in read.jobs] == [("a", 0.0), ("c", 60.0)]


def test_times_that_are_none(trace: Path) -> None:
    """Not read: dates whose day and month may be swapped, and clocks of two parts."""
    assert problems(
        trace, f"{HEADER}a,10/09/2017 07:01,60,1\nb,yesterday,60,1\nc,0,12:30,1\nd,0,1-25,1\n"
    ) == [
        "line 2, column submit_s: '10/09/2017 07:01' is no time: seconds, an epoch in s or ms, "
        "2026-01-31T12:00:00, 1-02:03:04 or 02:03:04",
        "line 3, column submit_s: 'yesterday' is no time: seconds, an epoch in s or ms, "
        "2026-01-31T12:00:00, 1-02:03:04 or 02:03:04",
        "line 4, column duration_s: '12:30' is not a length of time: seconds, 02:03:04 or 1-02:03:04",
        "line 5, column duration_s: '1-25' is not a length of time: seconds, 02:03:04 or 1-02:03:04",
    ]


def test_whole_numbers_may_be_written_with_a_point(trace: Path) -> None:
    """Pandas writes a column of whole numbers with a gap in it as 128.0; half a GPU is none still."""
    trace.write_text("job_id,submit_s,duration_s,gpus,batch_size\na,0,60,8.0,128.0\nb,0,60,1,\n")
    assert [(job.gpus, job.batch_size) for job in read_trace(trace).jobs] == [(8, 128), (1, None)]
    assert problems(trace, HEADER + "a,0,60,1.5\n") == [
        "line 2, column gpus: '1.5' is not a whole number ≥ 1"
    ]


# --------------------------------------------------------------------------------------- foreign columns


def test_our_own_format_is_guessed_first_and_the_renames_are_named(
    trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two columns have other names: the message is the option that reads the file, not another data set's
    columns."""
    trace.write_text("job_id,submit_time,duration_s,num_gpu,model,user\na,0,60,4,bert,ana\n")
    assert penstock("simulate", str(trace)) == 2
    error = capfd.readouterr().err.strip()
    option = "--columns submit_s=submit_time,gpus=num_gpu"
    assert error == f"penstock: {trace}: line 1: our own CSV is two renames away: {option}"
    name, value = option.split()
    assert simulated(capfd, trace, name, value)["makespan_s"] == 60.0
    [job] = read_trace(trace, columns={"submit_s": "submit_time", "gpus": "num_gpu", "owner": "user"}).jobs
    assert job == TraceJob("a", 0.0, 60.0, 4, model="bert", owner="ana")


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (
            "id,arrival_time,runtime,gpus",
            [
                "line 1: our own CSV is three renames away: --columns "
                "job_id=id,submit_s=arrival_time,duration_s=runtime"
            ],
        ),
        (
            "Job_ID,Submit_S,Duration_S,GPUs",
            [
                "line 1: our own CSV is four renames away: "
                "--columns job_id=Job_ID,submit_s=Submit_S,duration_s=Duration_S,gpus=GPUs"
            ],
        ),
        (
            "job_id,submit_s,Duration_MS,gpus",
            ["line 1, column duration_s: missing (format csv)"],
        ),
        (
            "job_id,submit_s,duration_ms,gpus",  # another unit is no rename
            ["line 1, column duration_s: missing (format csv)"],
        ),
        (
            "jobname,timestamp,gpus,colour",
            [
                "line 1: not our own CSV; these are renames: --columns job_id=jobname,submit_s=timestamp",
                "line 1, column duration_s: missing (format csv)",
            ],
        ),
        (
            "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,iteration_time,"
            "resource_time_0,resource_time_2",
            [
                "line 1: our own CSV is three renames away: --columns "
                "submit_s=submit_time,duration_s=duration,gpus=num_gpu",
                "line 1: format muri lacks resource_time_1",
            ],
        ),
    ],
)
def test_near_misses(trace: Path, header: str, found: list[str]) -> None:
    """What a column is probably called; a column of ours that nothing resembles is missing."""
    assert problems(trace, header + "\n") == found


@pytest.mark.parametrize("shape", ["csv", "json"])
def test_a_run_time_may_be_two_moments(trace: Path, shape: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A database has start and end of each job and no run time: the option that subtracts them is in the
    message."""
    rows = [("a", "08:00:00", "08:01:00", "08:03:30"), ("b", "08:00:30", "08:04:00", "08:04:00")]
    jobs = [
        {
            "job_id": name,
            "submit_s": f"2026-03-01 {at}",
            "start_time": f"2026-03-01 {begun}",
            "end-time": f"2026-03-01 {done}",
            "gpus": 4,
        }
        for name, at, begun, done in rows
    ]
    lines = [",".join(jobs[0]), *(",".join(map(str, job.values())) for job in jobs)]
    trace.write_text(
        json.dumps(jobs) if shape == "json" else "\n".join(lines).replace("end-time", "end_time")
    )
    end = "end-time" if shape == "json" else "end_time"
    option = f"--columns duration_s={end}-start_time"
    assert penstock("simulate", str(trace)) == 2
    if shape == "csv":
        assert f"our own CSV is one rename away: {option}" in capfd.readouterr().err
    read = read_trace(trace, columns={"duration_s": f"{end}-start_time"}, skip_bad=True)
    assert read.jobs == [TraceJob("a", 0, 150, 4)]
    assert read.left_out == []
    [bad] = read.skipped
    assert (bad.column, bad.text) == (end, "2026-03-01 08:04:00 lies not after start_time")
    renames = {"duration_s": f"{end}-start_time", "submit_s": "start_time"}
    assert read_trace(trace, columns=renames, skip_bad=True).jobs == [TraceJob("a", 0, 150, 4)]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("submit_s", "--columns submit_s: write OURS=THEIRS, as in submit_s=submit_time"),
        (
            "when=submit_time",
            "--columns when=submit_time: our CSV has no column when; there are job_id, submit_s",
        ),
        ("gpus=a,gpus=b", "--columns gpus=b: gpus comes twice"),
        ("gpus=a,cores=a", "--columns cores=a: a comes twice"),
        (
            "gpus=gpu",
            "line 1: --columns gpus=gpu: the file has no column gpu; there are job_id, submit_s, duration_s",
        ),
    ],
)
def test_columns_that_do_not_exist(
    trace: Path, capfd: pytest.CaptureFixture[str], option: str, message: str
) -> None:
    trace.write_text(HEADER + "a,0,60,1\n")
    assert penstock("simulate", str(trace), "--columns", option) == 2
    assert message in capfd.readouterr().err


def test_a_problem_names_the_column_of_the_file(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The file is repaired by the names that stand in it; a column that another one stands for is not
    read."""
    trace.write_text("job_id,submit_s,duration_s,wanted,gpus\na,0,60,x,1\nb,0,60,9,1\nc,0,60,8,\n")
    assert penstock("simulate", str(trace), "--columns", "gpus=wanted", "--cluster", "1x8") == 2
    assert [line.partition(".csv: ")[2] for line in capfd.readouterr().err.splitlines()] == [
        "line 2, column wanted: 'x' is not a whole number ≥ 1",
        "line 3, column wanted: 9 GPUs; the whole cluster has 8",
    ]
    assert penstock("traces", "convert", str(trace), "--columns", "gpus=wanted", "--skip-bad") == 0
    printed = capfd.readouterr()
    assert printed.out.splitlines() == ["job_id,submit_s,duration_s,gpus", "b,0,60,9", "c,0,60,8"]
    assert "left out: gpus" in printed.err


# ----------------------------------------------------------------------------------------- batch systems

SACCT = """\
JobID|JobName|User|State|Submit|Start|End|Elapsed|NNodes|ReqTRES|AllocTRES
101|train|ana|COMPLETED|2026-03-01T08:00:00|2026-03-01T08:05:00|2026-03-01T09:05:00|01:00:00|1|\
billing=8,cpu=8,gres/gpu:a100=2,gres/gpu=2,mem=64G,node=1|billing=8,cpu=16,gres/gpu=2,mem=64G,node=1
101.batch|batch|||2026-03-01T08:05:00|2026-03-01T08:05:00|2026-03-01T09:05:00|01:00:00|1||\
cpu=16,gres/gpu=2,mem=64G,node=1
101.0|python|||2026-03-01T08:05:01|2026-03-01T08:05:01|2026-03-01T09:05:00|00:59:59|1||\
cpu=16,gres/gpu=2,mem=64G,node=1
102_7|sweep|bo.b@lab|TIMEOUT|2026-03-01T08:00:30|2026-03-01T08:01:00|2026-03-02T10:04:04|1-02:03:04|\
2|cpu=32,gres/gpu=16,mem=512000M,node=2|
103|prep|ana|FAILED|2026-03-01T08:02:00|2026-03-01T08:02:00|2026-03-01T08:02:10|00:00:10|1|\
cpu=4,mem=8G,node=1|cpu=4,mem=8G,node=1
104_[1-9%2]|later|ana|PENDING|2026-03-01T08:03:00|Unknown|Unknown|00:00:00|1|cpu=4,gres/gpu=1,mem=8G,node=1|
105|gone|ana|CANCELLED by 1000|2026-03-01T08:03:00|None|2026-03-01T08:04:00|00:00:00|1|\
cpu=4,gres/gpu=1,mem=8G,node=1|
"""


def test_saccts_output(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A month of Slurm as `sacct -P` prints it: steps are no jobs, and what never ran has no run time."""
    trace.write_text(SACCT)
    read = read_trace(trace)
    assert read.format == "sacct"
    assert read.jobs == [
        TraceJob(
            "101", 0, 3_600, 2, owner="ana", cores=16, host_memory_mib=65_536, gpu_models=("a100",), workers=1
        ),
        TraceJob("102_7", 30, 93_784, 16, owner="bo.b-lab", cores=32, host_memory_mib=512_000, workers=2),
        TraceJob("103", 120, 10, 0, owner="ana", cores=4, host_memory_mib=8_192, workers=1),
    ]
    assert dict(read.passed) == {"job steps": 2, "jobs that never ran": 2}
    found = simulated(capfd, trace, "--cluster", "3x8@a100")
    assert (found["finished_jobs"], found["makespan_s"]) == (3, 93_814.0)
    assert penstock("traces", "describe", str(trace)) == 0
    assert "left out: job steps (2), jobs that never ran (2)" in capfd.readouterr().err


def test_a_slurm_csv(trace: Path) -> None:
    """The same by way of a spreadsheet: commas, quotes, small letters, seconds and epochs."""
    trace.write_text(
        "jobidraw,user,submit,start,elapsedraw,alloctres\n"
        '7,ana,1772352000,1772352060,120,"cpu=8,gres/gpu:h100=3,gres/gpu:a100=1,mem=1.5T,node=3"\n'
    )
    [job] = read_trace(trace).jobs
    assert job == TraceJob("7", 0, 120, 4, owner="ana", cores=8, host_memory_mib=1_572_864)


def test_sacct_without_the_columns_that_matter(trace: Path) -> None:
    """By default sacct prints neither times nor GPUs: the message is the command that does."""
    trace.write_text("JobID|JobName|Partition|Account|AllocCPUS|State|ExitCode\n1|a|b|c|1|COMPLETED|0:0\n")
    command = "sacct -P -X --format=JobID,User,State,Submit,Start,End,Elapsed,ReqTRES,AllocTRES"
    assert problems(trace, trace.read_text()) == [
        f"line 1: format sacct lacks Submit, Elapsed, AllocTRES: {command}"
    ]


def test_saccts_table_for_people(trace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without `-P` columns are cut to their width; a file whose lines are all bad lists these and nothing
    else."""
    text = "JobID           JobName  Partition\n------------ ---------- ----------\n101      train    gpu\n"
    assert problems(trace, text) == [
        f"line 1: sacct's output as a table for people is not read: {SACCT_COMMAND}"
    ]
    trace.write_text(HEADER + "a,0,60,0.5\n")
    bad = f"penstock: {trace}: line 2, column gpus: '0.5' is not a whole number ≥ 1"
    none = f"penstock: {trace}: file: no job in it"
    assert penstock("simulate", str(trace)) == 2
    assert capfd.readouterr().err.splitlines() == [bad]
    assert penstock("simulate", str(trace), "--skip-bad") == 2
    assert capfd.readouterr().err.splitlines() == [bad, none]


def test_sacct_lines_that_cannot_be_read(trace: Path) -> None:
    """A TRES of another form, a memory without a number, a job of neither cores nor GPUs."""
    head = "JobID|Submit|Elapsed|AllocTRES\n"
    trace.write_text(f"{head[:-1]}|\n1|2026-03-01T08:00:00|00:01:00|cpu=1|\n")
    assert read_trace(trace).left_out == [], "`sacct -p` ends its lines with a bar"
    text = (
        "1|2026-03-01T08:00:00|00:01:00|gpu:4\n2|2026-03-01T08:00:00|00:01:00|cpu=1,mem=lots\n"
        "3|2026-03-01T08:00:00|00:01:00|node=1\n4|2026-03-01T08:00:00|soon|cpu=1\n"
    )
    assert problems(trace, head + text) == [
        "line 2, column AllocTRES: 'gpu:4' is not a list of name=count",
        "line 3, column AllocTRES: mem=lots is not an amount",
        "line 4, column AllocTRES: neither cores nor GPUs",
        "line 5, column Elapsed: 'soon' is not a length of time: seconds, 02:03:04 or 1-02:03:04",
    ]


def test_a_helios_csv(trace: Path) -> None:
    """As SenseTime publishes its clusters: zones in the times, no start for what was cancelled in the
    queue."""
    trace.write_text(
        "job_id,user,vc,jobname,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,"
        "duration,queue\n"
        "5,u1,vcA,train,16,64,2,COMPLETED,2020-04-01 00:00:10,2020-04-01 00:01:00,2020-04-01 "
        "01:01:00,3600,50\n"
        "6,u2,vcA,eval,0,4.0,1,FAILED,2020-04-01 00:00:40,2020-04-01 00:00:40,2020-04-01 00:00:45,5,0\n"
        "7,u2,vcB,none,1,4,1,CANCELLED,2020-04-01 00:00:50,None,2020-04-01 00:01:00,0,10\n"
    )
    read = read_trace(trace)
    assert read.format == "helios"
    assert read.jobs == [
        TraceJob("5", 0, 3_600, 16, owner="u1", cores=64, workers=2),
        TraceJob("6", 30, 5, 0, owner="u2", cores=4, workers=1),
    ]
    assert dict(read.passed) == {"jobs that never ran": 1}


# ----------------------------------------------------------------------------------------------- README

README = Path(__file__).parents[4] / "libs/penstock/simulator/README.md"


def test_the_commands_of_the_readme_read_what_it_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A newcomer types the section line by line; what Slurm and Kubernetes would write stands there
    already."""
    section = README.read_text().partition("## Data of your own\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", section, re.DOTALL)
    typed = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    begun, ended = "2026-03-01T08:00:10Z", "2026-03-01T08:10:10Z"
    job = kubernetes_job("j", begun, {"startTime": begun, "completionTime": ended})
    del job["spec"]["template"]["spec"]["nodeSelector"]  # type: ignore[index]
    made = {
        "sacct": ("sacct.txt", SACCT),
        "kubectl": ("jobs.json", json.dumps({"kind": "List", "items": [job]})),
    }
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text("job_id,submit_time,duration_s,num_gpu\na,2026-03-01 08:00,60,4\n")
    ran = 0
    for line in typed:
        program, *words = shlex.split(line)
        if program == "penstock":
            assert penstock(*words) == 0, (line, capfd.readouterr().err)
            ran += 1
        else:
            name, content = made.pop(program)
            assert words[-2:] == [">", name]
            Path(name).write_text(content)
    assert (ran, made) == (5, {})
    assert read_trace(Path("ours.csv")).jobs == [TraceJob("a", 0, 60, 4)]
    assert SACCT_COMMAND.split("--format=")[1] in section, "the message and the page give the same command"
