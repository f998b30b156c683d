"""Every format of trace, line by line: what becomes of it, and what is reported of what cannot be read."""

import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from penstock.runtime.files.csv_import import TIMES, BadFile
from penstock.runtime.files.times import EPOCH_S
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.formats import OWN
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.files.writing import trace_lines, write_lines
from penstock.simulator.traces.fitting import ClusterCapacity
from penstock.simulator.traces.jobs import TraceJob
from tests.unit.simulator.traces.bad_traces import problems

PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,"
    "scheduled_time\n"
)
GAVEL = "{}\tpython3 main.py -b 64\timages\t--steps\t1\t{}\t{}\t1\t-1.000000\t{}\n"
SHOCKWAVE = "{}\tpython3 main.py -b 64\timages\t--steps\t1\t{}\t{}\tgns\t1\t-1.000000\t{}\t{}\n"
CSV = "job_id,submit_s,duration_s,gpus\n"
UNIT = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.csv"


# ---------------------------------------------------------------------------------------------- formats


def test_openb_pods_ask_for_cores_memory_and_shares_of_gpus(trace: Path) -> None:
    """A pod on half a GPU, one without any, one that was never placed, one that only certain GPUs will do
    for."""
    trace.write_text(
        PODS
        + "half,12500,57344,1,460,,LS,Running,100,500,120\n"
        + "cores,8000,30517,0,0,,BE,Succeeded,0,90,0\n"
        + "pending,1000,0,8,1000,V100M16|V100M32,LS,Pending,50,90,\n"
    )
    read = read_trace(trace)
    assert (read.format, list(read.left_out)) == ("openb", ["qos", "pod_phase"])
    cores, pending, half = read.jobs
    assert half == TraceJob(
        "half", 100, 380, 1, cores=12.5, host_memory_mib=57_344, gpu_share_milli=460, workers=1
    )
    assert (cores.gpus, cores.gpu_share_milli, cores.duration_s, cores.cores) == (0, 1_000, 90.0, 8.0)
    assert (pending.duration_s, pending.gpu_models) == (0.0, ("V100M16", "V100M32"))


def test_openb_pods_that_nobody_could_have_run(trace: Path) -> None:
    """A fractional pod on two GPUs, a GPU pod of no GPU, one that ended before it began."""
    text = PODS + (
        "a,1,1,2,500,,,,0,9,0\nb,1,1,1,0,,,,0,9,0\nc,1,1,0,0,,,,0,5,9\nd,1,-1,0,0,a "
        "b,,,0,9,0\ne,1,1,17,1000,,,,0,9,0\n"
    )
    assert problems(trace, text) == [
        "line 2, column gpu_milli: 500 of each of 2 GPUs: only a single one can be shared",
        "line 3, column gpu_milli: 0 of each of 1 GPU",
        "line 4, column deletion_time: 5 lies before scheduled_time 9",
        "line 5, column memory_mib: '-1' is not a whole number ≥ 0",
        "line 5, column gpu_spec: 'a b' is not a name of letters, digits and . _ : / -",
        "line 6, column num_gpu: 17 is more than 16",
    ]


def test_gavel_tells_steps_and_no_run_time(trace: Path) -> None:
    """Without a header: the line is the job's number; models without a batch size exist."""
    trace.write_text(
        GAVEL.format("ResNet-18 (batch size 128)", 925_982, 4, "12.5") + GAVEL.format("A3C", 7, 1, 0)
    )
    read = read_trace(trace)
    assert read.format == "gavel"
    assert read.jobs == [
        TraceJob("gavel-1", 0, 0, 1, "A3C", iterations=7),
        TraceJob("gavel-0", 12.5, 0, 4, "ResNet-18", 128, iterations=925_982),
    ]
    assert read.lines == {"gavel-0": 1, "gavel-1": 2}
    text = GAVEL.format("ResNet-18 (batch 128)", 0, 1, -1) + GAVEL.format("A3C", 7, 1, 0).replace(
        "\t1\t", "\t", 1
    )
    assert problems(trace, text) == [
        "line 1, column job_type: 'ResNet-18 (batch 128)' is no `<model> (batch size <n>)`",
        "line 1, column total_steps: 0 is less than 1",
        f"line 1, column arrival: '-1' is no time: {TIMES}",
        "line 2: 9 fields, the header has 10",
    ]


def test_shockwave_is_gavel_with_run_times(trace: Path) -> None:
    """How the batch size changes on the way is not read: the report names the column."""
    trace.write_text(SHOCKWAVE.format("LM (batch size 10)", 134_583, 2, 1418, 55))
    read = read_trace(trace)
    assert (read.format, read.jobs) == (
        "shockwave",
        [TraceJob("shockwave-0", 55, 1_418, 2, "LM", 10, iterations=134_583)],
    )
    assert "mode" in read.left_out


def test_tiresias_counts_in_seconds(trace: Path) -> None:
    """Like Muri's trace at first sight, but without stages, and not in milliseconds."""
    trace.write_text(
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,8,30,133,vgg11,147,23\n"
    )
    read = read_trace(trace)
    assert (read.format, read.left_out) == ("tiresias", ["interval"])
    assert read.jobs == [TraceJob("1", 30, 147, 8, "vgg11", iterations=133)]


def test_a_users_own_columns(trace: Path) -> None:
    """Cores, memory, shares and GPU types may stand in a plain CSV; an empty field has no value."""
    trace.write_text(
        "job_id,submit_s,duration_s,gpus,cores,gpu_share_milli,gpu_models,workers,patience_s\n"
        "a,0,60,1,2.5,250,T4|P100,,\nb,0,,4,,,,2,30\nc,0,5,0,16,,,,\n"
    )
    shared, gang, cores = read_trace(trace).jobs
    assert (shared.cores, shared.gpu_share_milli, shared.gpu_models) == (2.5, 250, ("T4", "P100"))
    assert (gang.workers, gang.patience_s, gang.duration_s, gang.cores) == (2, 30.0, 0.0, None)
    assert (cores.gpus, cores.cores) == (0, 16.0)
    text = "job_id,submit_s,duration_s,gpus,workers,gpu_share_milli\na,0,1,3,2,\nb,0,1,2,,500\nc,0,1,0,,\n"
    assert problems(trace, text) == [
        "line 2, column workers: 3 GPUs cannot be cut into 2 equal workers",
        "line 3, column gpu_share_milli: a share of 2 GPUs: only a single one can be shared",
        "line 4, column gpus: 0 is less than 1",
    ]


# -------------------------------------------------------------------------------------------- encodings


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((CSV + "a,0,60,1\n").encode("utf-16"), ["file: UTF-16; save it as UTF-8"]),
        ((CSV + "a,0,60,1\n").encode("utf-16-le"), ["line 1: a NUL character: no table in UTF-8"]),
        (gzip.compress(CSV.encode(), mtime=0), ["file: packed (gzip); unpack it, and give the table in it"]),
        (b"PK\x03\x04...", ["file: packed (zip); unpack it, and give the table in it"]),
        (b"\x89PNG\r\n\x1a\n\x00\x00", ["line 1: byte 0x89 is not UTF-8: no table in UTF-8"]),
        (
            (CSV + "caf\xe9,0,60,1\nb,0,60,1\nc,0,\xb9,1\n").encode("latin-1"),
            [
                "line 2, column job_id: byte 0xe9 is not UTF-8",
                "line 4, column duration_s: byte 0xb9 is not UTF-8",
            ],
        ),
        (
            b"job_id;submit_s;duration_s;gpus\na;0,5;60;1\n",
            [
                "line 2, column submit_s: '0,5' is no time: seconds, an epoch in s or ms, "
                "2026-01-31T12:00:00, 1-02:03:04 or 02:03:04"
            ],
        ),
        (
            CSV.encode() + b'a,0,"60,1\nb,0,60,x\n',
            [
                "line 2: a quote is not closed",
                "line 3, column gpus: 'x' is not a whole number \xe2\x89\xa5 1".encode("latin-1").decode(),
            ],
        ),
        (CSV.encode() + b"a" * 300_000 + b",0,60,1\n", ["line 2: longer than 262144 characters"]),
        (b'"job_id,submit_s\n', ["line 1: a quote is not closed"]),
        (
            b"0,alexnet,8,23349,1\n",
            ["line 1: no header of any format; our own needs job_id, submit_s, duration_s, gpus"],
        ),
        (
            b"job_id,submit_s,remark\n",
            ["line 1, column duration_s: missing (format csv)", "line 1, column gpus: missing (format csv)"],
        ),
        (b"\n" + CSV.encode(), ["file: empty: a header line was expected"]),
    ],
)
def test_files_from_the_wild(trace: Path, content: bytes, message: list[str]) -> None:
    """Saved by a spreadsheet as UTF-16 or Latin-1, with decimal commas, torn in the middle, or no text at
    all."""
    assert problems(trace, content) == message


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_and_marks_of_all_systems(trace: Path, newline: str) -> None:
    """A byte order mark, Windows' and old Apple's line ends: the same two jobs, and the same line numbers."""
    lines = ["job_id,submit_s,duration_s,gpus", 'a,0,"60",1', "", "b,1,60,2", "c,1,60,x"]
    trace.write_bytes(b"\xef\xbb\xbf" + newline.join(lines).encode())
    read = read_trace(trace, skip_bad=True)
    assert [(job.job_id, job.gpus) for job in read.jobs] == [("a", 1), ("b", 2)]
    assert [problem.line for problem in read.skipped] == [5]


@pytest.mark.parametrize("mark", [";", "\t", "|"])
@pytest.mark.parametrize("more", ["", ",model,owner,cores,workers,iterations,batch_size", ",note" * 8])
def test_columns_between_other_marks(trace: Path, mark: str, more: str) -> None:
    """A spreadsheet of another country, a database's dump; with ten or twelve columns no trace of Gavel or
    Shockwave."""
    names = [f"{name}{place}" if name == "note" else name for place, name in enumerate(more.split(",")[1:])]
    header = mark.join(["job_id", "submit_s", "duration_s", "gpus", *names])
    trace.write_text(header + "\n" + mark.join(["a", "0", '"60"', "4", *[""] * len(names)]) + "\n")
    read = read_trace(trace)
    assert (read.format, read.jobs) == ("csv", [TraceJob("a", 0, 60, 4)])


def test_places_that_hold_no_file(tmp_path: Path) -> None:
    """A folder, a device without end, a name too many."""
    for path, message in (
        (tmp_path, "a folder; name a file"),
        (Path("/dev/zero"), "no regular file; name a file"),
        (tmp_path / "gone.csv", "No such file or directory"),
    ):
        with pytest.raises(BadFile, match=message):
            read_trace(path)


# ------------------------------------------------------------------------------------------- the cluster


def test_jobs_that_no_node_can_hold_are_told_before_anything_runs(trace: Path) -> None:
    """GPU types that the cluster lacks, more GPUs of a type than there are, more cores or memory than any
    node has."""
    capacity = ClusterCapacity(nodes_of("2x8+1x4"))
    trace.write_text(
        "job_id,submit_s,duration_s,gpus,gpu_models,cores,host_memory_mib,workers\n"
        "fits,0,60,16,,,,\nh100,0,60,1,H100|A100,,,\nlarge,0,60,21,,,,\nfat,0,60,8,,,9999999,\n"
        "wide,0,60,1,,97,,\nany,0,60,4,GPU|H100,48,,2\ncut,0,60,18,,,,2\n"
    )
    with pytest.raises(BadFile) as caught:
        read_trace(trace, fits=capacity.problems)
    assert [str(problem) for problem in caught.value.problems] == [
        "line 3, column gpu_models: no node has H100 or A100; there are GPU: name the model, as in 8x8@H100",
        "line 4, column gpus: 21 GPUs; the whole cluster has 20",
        "line 5, column host_memory_mib: 8 GPUs, 9999999 MiB: no node holds that",
        "line 6, column cores: 1 GPU, 97 cores: no node holds that",
        "line 8, column gpus: 2 workers of 9 GPUs: the nodes hold 0",
    ]
    assert [job.job_id for job in read_trace(trace, fits=capacity.problems, skip_bad=True).jobs] == [
        "fits",
        "any",
    ]


def test_gpus_of_the_wrong_type_do_not_count(trace: Path) -> None:
    """Sixteen GPUs are there, but only four of the type that the job will do with."""
    capacity = ClusterCapacity(nodes_of("2x8x32@V100+1x4x16@T4"))
    trace.write_text(
        "job_id,submit_s,duration_s,gpus,gpu_models\n"
        "a,0,60,8,T4\nb,0,60,4,T4\nc,0,60,16,T4|V100\nd,0,60,17,V100\n"
    )
    read = read_trace(trace, fits=capacity.problems, skip_bad=True)
    assert [job.job_id for job in read.jobs] == ["b", "c"]
    assert [str(problem) for problem in read.skipped] == [
        "line 2, column gpus: 8 GPUs; the whole cluster has 4 of T4",
        "line 5, column gpus: 17 GPUs; the whole cluster has 16 of V100",
    ]


def test_what_no_node_holds_names_the_gpus_that_were_asked_for(trace: Path) -> None:
    """A node with enough cores is there, but it has other GPUs: without the model the message looks wrong."""
    capacity = ClusterCapacity(nodes_of("2x8x96@V100+2x4x16@T4"))
    trace.write_text(
        "job_id,submit_s,duration_s,gpus,gpu_models,cores,workers,gpu_memory_mib\n"
        "a,0,60,4,T4,64,,\nb,0,60,8,T4,8,1,\nc,0,60,6,T4,6,2,\nd,0,60,6,T4,60,2,\n"
        "e,0,60,1,T4|V100,,,99999\nf,0,60,1,,97,,\n"
    )
    read = read_trace(trace, fits=capacity.problems, skip_bad=True)
    assert [job.job_id for job in read.jobs] == ["c"]
    assert [str(problem) for problem in read.skipped] == [
        "line 2, column cores: 4 GPUs, 64 cores: no node with T4 holds that",
        "line 3, column gpus: 8 GPUs, 8 cores: no node with T4 holds that",
        "line 5, column cores: 2 workers of 3 GPUs, 30 cores: the nodes with T4 hold 0",
        "line 6, column gpu_memory_mib: 99999 MiB; no T4 or V100 has so much",
        "line 7, column cores: 1 GPU, 97 cores: no node holds that",
    ]


# ------------------------------------------------------------------------------------------- properties

CELL = st.one_of(
    st.sampled_from(
        [
            "a",
            "b",
            "0",
            "1",
            "60",
            "-1",
            "nan",
            "inf",
            "1e9",
            "",
            " ",
            '"',
            '""',
            '"1"',
            "x" * 300,
            "0.5",
            "1.0",
            "2026-01-01",
            "1700000000",
            "1-02:03:04",
            "None",
            "a.batch",
            "cpu=1,mem=1G",
        ]
    ),
    st.text(alphabet=st.characters(exclude_characters="\n\r,\t"), max_size=8),
)
KINDS = {
    "csv": (CSV, ",", "{},{},1,1"),
    "openb": (PODS, ",", "{},1000,{},1,500,,,,0,9,0"),
    "philly": ("timestamp,duration,num_gpus,cluster\n", ",", "2017-10-09 07:01:5{1},1,1,{0}"),
    "pollux": ("name,time,application,num_replicas,batch_size\n", ",", "{},{},bert,1,8"),
    "gavel": (GAVEL.format("A3C", 7, 1, 0), "\t", "{}" + 4 * "\tx" + "\t7\t1\t1\t1\t{}"),
    "sacct": ("JobID|Start|Submit|Elapsed|AllocTRES\n", "|", "{}|x|2026-03-01T08:00:0{}|00:01:00|cpu=1"),
    "helios": ("job_id,gpu_num,submit_time,duration\n", ",", "{},1,2020-04-01 00:00:1{},60"),
}
"""Format → its first line, what separates fields, and a good line for a name and a digit."""


@st.composite
def files(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A first line of some format, and lines of which some are good, some nearly, some nothing at all."""
    first, delimiter, good = KINDS[draw(st.sampled_from(list(KINDS)))]
    fields = good.count(delimiter) + 1
    whole = st.builds(good.format, st.text("abc", min_size=1, max_size=3), st.integers(0, 9))
    cells = st.lists(CELL, min_size=fields, max_size=fields).map(delimiter.join)
    ragged = st.lists(CELL, max_size=fields + 2).map(delimiter.join)
    return first, draw(st.lists(st.one_of(whole, cells, ragged), min_size=1, max_size=12))


@UNIT
@given(found=files())
@example(found=(CSV, ["a,0,1,1", '"b,0,1,1', 'c,0,1,"1', "a,0,1,1"]))
def test_every_line_is_a_job_or_a_problem(trace: Path, found: tuple[str, list[str]]) -> None:
    """Whatever stands in a file: no line vanishes, and none is both; lines that are no jobs are counted."""
    first, lines = found
    trace.write_bytes((first + "\n".join(lines)).encode("utf-8", "surrogatepass"))
    data = {number for number, line in enumerate(lines, 2) if line.strip()}
    if "\t" in first:
        data.add(1)  # there is no header: the first line is a job
    try:
        read = read_trace(trace, skip_bad=True)
    except BadFile as error:
        refused, read = error.problems, None
    if read is None:
        lines_of_problems = {problem.line for problem in refused} - {0}
        assert lines_of_problems == data or "no job in it, but" in refused[-1].text
        assert lines_of_problems <= data
        return
    good, bad = set(read.lines.values()), {problem.line for problem in read.skipped}
    assert len(read.jobs) == len(read.lines)
    assert not good & bad
    assert good | bad <= data
    assert len(good | bad) + sum(read.passed.values()) == len(data)
    assert min(job.submit_s for job in read.jobs) >= 0
    assert max(job.submit_s for job in read.jobs) < EPOCH_S * 20
    if bad:
        with pytest.raises(BadFile) as caught:
            read_trace(trace)
        assert list(caught.value.problems) == list(read.skipped)


NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,20}", fullmatch=True)
TEXT = st.characters(codec="utf-8")
SECONDS = st.floats(0, 1e11, allow_nan=False).map(lambda value: value + 0.0)
FROM_THE_START = st.floats(0, EPOCH_S, exclude_max=True, allow_nan=False).map(lambda value: value + 0.0)
"""Greater numbers are dates, and count from the first of them."""


@st.composite
def jobs(draw: st.DrawFn) -> TraceJob:
    gpus = draw(st.integers(0, 64))
    return TraceJob(
        job_id=draw(NAMES),
        submit_s=draw(FROM_THE_START),
        duration_s=draw(st.one_of(st.just(0.0), SECONDS)),
        gpus=gpus,
        model=draw(st.one_of(st.just(""), NAMES)),
        batch_size=draw(st.none() | st.integers(1, 1 << 30)),
        owner=draw(st.one_of(st.just(""), NAMES)),
        iterations=draw(st.none() | st.integers(1, 1 << 53)),
        cores=draw((st.none() if gpus else st.nothing()) | st.floats(0.001, 1024)),
        host_memory_mib=draw(st.none() | st.integers(1, 1 << 30)),
        gpu_memory_mib=draw(st.none() | st.integers(1, 1 << 30)),
        gpu_share_milli=draw(st.integers(1, 1_000)) if gpus == 1 else 1_000,
        gpu_models=tuple(draw(st.lists(NAMES, max_size=3))),
        workers=draw(st.none() | st.sampled_from([n for n in (1, 2, 4, 8) if gpus % n == 0])),
        parameter_servers=draw(st.integers(0, 4)),
        server_gpus=draw(st.integers(0, 4)),
        patience_s=draw(st.none() | st.floats(0.001, 1e6)),  # clock: a field of the trace
        inference=draw(st.booleans()),
        memory_bandwidth=draw(st.floats(0, 1)),
        labels=tuple(draw(st.dictionaries(st.text(TEXT, min_size=1), st.text(TEXT), max_size=3)).items()),
    )


@UNIT
@given(found=st.lists(jobs(), min_size=1, max_size=8, unique_by=lambda job: job.job_id))
def test_our_csv_holds_all_of_a_job(trace: Path, found: list[TraceJob]) -> None:
    """Converted and read again, every job is the same: all fields but the measured stages have their
    column."""
    assert set(OWN) == set(TraceJob._fields) - {"stages"}
    found.sort(key=lambda job: job.submit_s)
    write_lines(trace, trace_lines(found))
    assert list(read_trace(trace).jobs) == found
