"""A cell's past as a trace: simulated, exported, simulated again."""

# clocks: all times are those of simulated cells

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cli.app import run as main
from penstock.model.decisions import ledger_events
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import Estimate, ResourceVector, TaskPlacement
from penstock.model.schema.event import Event
from penstock.model.wire.codec import encode
from penstock.runtime.files.event_import import read_events, read_ledger
from penstock.simulator.commands.export import lines_of
from penstock.simulator.engine import Options
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.cluster import cluster_of
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.files.writing import write_lines
from penstock.simulator.traces.history import History, Left, PastJob, mixed, node_rows
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import ends, simulation

EIGHTH_S = 0.125  # such times are exact in doubles and in milliseconds alike
CLUSTER = "2x4"
EIGHTHS = st.integers(1, 400).map(lambda count: count * EIGHTH_S)
JOBS = st.lists(st.tuples(EIGHTHS, EIGHTHS, st.sampled_from((1, 2, 3, 4, 8))), min_size=1, max_size=12)


def ran(
    jobs: list[TraceJob], folder: Path, profile: str = "fifo", options: Options | None = None
) -> tuple[dict[str, float], History]:
    """(completion times, its history)."""
    records: list[bytes] = []
    found = ends(simulation(jobs, profile, CLUSTER, options, records.append))
    (folder / "ledger.jsonl").write_bytes(b"\n".join(records) + b"\n")
    history = History()
    assert read_ledger(folder / "ledger.jsonl", history) == ""
    submitted = {job.job_id: job.submit_s for job in jobs}
    return {job_id: end_s - submitted[job_id] for job_id, end_s in found.items()}, history


def written(past: list[PastJob], folder: Path) -> list[TraceJob]:
    write_lines(folder / "trace.csv", lines_of(past))
    return list(read_trace(folder / "trace.csv").jobs)


@settings(deadline=None, max_examples=25)
@given(sampled=JOBS, profile=st.sampled_from(("fifo", "srtf", "tiresias", "even")))
def test_the_export_of_a_run_runs_the_same(
    tmp_path_factory: pytest.TempPathFactory, sampled: list[tuple[float, float, int]], profile: str
) -> None:
    """A month is exported and replayed under the policy that it ran under: every job takes exactly as long
    again.

    Under srtf and tiresias jobs are stopped and go on later: their run time is the sum of their attempts.
    """
    folder = tmp_path_factory.mktemp("export")
    jobs = [TraceJob(f"j{n}", at_s, run_s, gpus) for n, (at_s, run_s, gpus) in enumerate(sampled)]
    first, history = ran(jobs, folder, profile)
    past, left = history.jobs()
    assert left == Left(0, 0, 0)
    again = written(past, folder)
    assert {job.job_id: (job.duration_s, job.gpus) for job in again} == {
        job.job_id: (job.duration_s, job.gpus) for job in jobs
    }
    assert ran(again, folder, profile)[0] == first


def test_a_run_time_leaves_out_launching_and_what_follows_the_stop(tmp_path: Path) -> None:
    """Nodes take a second to start a task, and three to stop one: neither is work that a job asked for."""
    jobs = [TraceJob("long", 0, 40, 8), TraceJob("short", 10, 5, 8)]
    _, history = ran(jobs, tmp_path, "srtf", Options(latency=Latency(start_s=1, stop_s=3)))
    past, _ = history.jobs()
    assert {one.job.job_id: one.job.duration_s for one in past} == {"long": 40.0, "short": 5.0}


def test_all_that_a_job_asked_for_comes_back(tmp_path: Path) -> None:
    """A gang of two workers with half of what its node has; a job that takes half a GPU; a user who waits a
    minute."""
    jobs = [
        TraceJob(
            "gang",
            0,
            8,
            4,
            "bert",
            32,
            "ana",
            cores=6,
            host_memory_mib=8_000,
            gpu_memory_mib=9_000,
            workers=2,
        ),
        TraceJob(
            "half", 1, 4, 1, "lm", 8, "ben", gpu_share_milli=460, gpu_memory_mib=512, gpu_models=("GPU", "T4")
        ),
        TraceJob(
            "hasty", 2, 4, 1, owner="cy", patience_s=60.0, parameter_servers=1, labels=(("class", "gold|1"),)
        ),
    ]
    _, history = ran(jobs, tmp_path)
    found = {job.job_id: job for job in written(history.jobs()[0], tmp_path)}
    assert found["gang"] == jobs[0]
    half = found["half"]
    assert (half.gpu_share_milli, half.gpu_models, half.gpu_memory_mib) == (460, ("GPU", "T4"), 512)
    hasty = found["hasty"]
    assert (hasty.patience_s, hasty.parameter_servers, hasty.labels) == (60.0, 1, (("class", "gold|1"),))


def test_what_has_not_run_is_counted_and_what_still_runs_counts_so_far(tmp_path: Path) -> None:
    """The export is made while the cell works: one job runs, one waits behind it, one gave up."""
    jobs = [
        TraceJob("runs", 1, 100, 8),
        TraceJob("waits", 2, 5, 8),
        TraceJob("gives-up", 3, 5, 8, patience_s=10.0),
        TraceJob("later", 50, 5, 1),
    ]
    records: list[bytes] = []
    running = simulation(jobs, "fifo", CLUSTER, sink=records.append)
    while running.now_s < 50:
        assert running.step()
    (tmp_path / "ledger.jsonl").write_bytes(b"\n".join(records))
    history = History()
    assert read_ledger(tmp_path / "ledger.jsonl", history) == ""
    past, left = history.jobs()
    assert [(one.job.job_id, one.job.duration_s, one.outcome) for one in past] == [("runs", 49.0, "running")]
    assert left == Left(never_ran=3, still_running=1, unknown=0)
    history.until(80_000)
    past, _ = history.jobs()
    assert [one.job.duration_s for one in past] == [79.0], "half a minute without a record later"
    assert history.jobs(from_ms=2_000) == ([], Left(3, 0, 0))
    assert history.jobs(until_ms=2_000)[1] == Left(0, 1, 0)


def test_a_window_that_begins_before_the_cell_begins_with_it(tmp_path: Path) -> None:
    """`--from 30d` on a cell that is ten minutes old: the trace began with 30 days in which nothing could
    happen."""
    jobs = [TraceJob("early", 120, 60, 8), TraceJob("late", 400, 60, 8)]
    ran(jobs, tmp_path)
    trace = tmp_path / "month.csv"
    for since, found in (
        ("30d", [("early", 120.0), ("late", 400.0)]),
        ("1970-01-01", [("early", 120.0), ("late", 400.0)]),
        ("2m", [("late", 60.0)]),
    ):
        assert (
            main(["export", "--ledger", str(tmp_path / "ledger.jsonl"), "--from", since, "-o", str(trace)])
            == 0
        )
        assert [(job.job_id, job.submit_s) for job in read_trace(trace).jobs] == found, since


def test_a_torn_ledger_is_reported_and_no_file_is_no_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy broke off in the middle of a record; somebody names the trace instead of the ledger."""
    _, _ = ran([TraceJob("a", 0, 8, 1)], tmp_path)
    ledger, out = tmp_path / "ledger.jsonl", tmp_path / "out.csv"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-20])
    assert main(["export", "--ledger", str(ledger), "-o", str(out)]) == 0
    assert "do not follow the one before and are void" in capsys.readouterr().err
    out.unlink()
    for content, message in (
        (b"", "empty: a ledger was expected"),
        (b"job_id,submit_s,duration_s,gpus\na,0,1,1\n", "no ledger: none of its 2 lines begins one"),
        (whole.splitlines()[0], "no job that ran was submitted in this time"),
    ):
        ledger.write_bytes(content)
        assert main(["export", "--ledger", str(ledger), "-o", str(out)]) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert main(["export", "--ledger", str(tmp_path), "-o", str(out)]) == 2
    ledger.write_bytes(whole)
    assert main(["export", "--ledger", str(ledger), "-o", str(tmp_path / "no/such/folder.csv")]) == 2
    assert main(["export", "--ledger", str(ledger), "--from", "last month"]) == 2
    assert "neither a date and time nor a span" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*")), "no half file stays behind"


def test_the_command_line_reads_a_ledger_without_any_gateway(tmp_path: Path) -> None:
    """A ledger of last night's simulation lies on a laptop that has no cell."""
    ran([TraceJob("a", 0, 8, 1)], tmp_path)
    command = [sys.executable, "-c", "from penstock.cli.main import main; main()", "export", "--ledger"]
    done = subprocess.run([*command, str(tmp_path / "ledger.jsonl")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "a,0,8,1,unknown,1,1024,1024,1,succeeded"
    both = subprocess.run([*command, "x", "--cell", "c"], capture_output=True, text=True)
    assert (both.returncode, len(both.stderr.splitlines())) == (2, 1)


def test_what_happened_before_the_first_stored_event_is_counted() -> None:
    """The cell stores a month of events: a job submitted before them ends in it, and nobody knows what it
    asked for."""
    place = TaskPlacement(task_id="old.1.w0", role="worker", rank=0, node_id="n", gpus=(0,))
    need = Estimate(worker=ResourceVector(gpus=1), confidence=1, tier="user", source="as asked")
    events: list[tuple[int, Event]] = [
        (5, JobEstimated(job_id="old", estimate=need)),
        (6, ledger_events.PlacementDecided(job_id="old", attempt=1, tasks=(place,))),
        (7, external_events.TaskStarted(node_id="n", task_id="old.1.w0", token=1, pid=2, started_ms=7)),
        (9, ledger_events.JobEnded(job_id="old", outcome="succeeded")),
    ]
    streamed = [
        b'{"seq":%d,"n":0,"at_ms":%d,"type":"%b","data":%b}'
        % (seq, at_ms, event.TYPE.encode(), encode(event))
        for seq, (at_ms, event) in enumerate(events, start=40)
    ]
    unknown = b'{"seq":44,"n":0,"at_ms":9,"type":"penstock.colour.changed","data":{}}'
    history = History()
    read_events([*streamed, unknown], history)
    assert history.jobs() == ([], Left(never_ran=0, still_running=0, unknown=1))


def test_nodes_of_several_kinds_of_gpus_are_reported(tmp_path: Path) -> None:
    """A node got one newer card: a list of nodes has one kind per node."""
    gpus = tuple(Gpu(index=at, uuid=f"GPU-{at}", model=model, memory_mib=1) for at, model in enumerate("AB"))
    node = NodeSpec(node_id="n", boot_id="b", cores=8, host_memory_mib=9, bandwidth_mbps=25_000, gpus=gpus)
    history = History()
    history.replica.take_fact(1, 1, external_events.NodeJoined(node=node), history.see)
    assert mixed(history.nodes["n"])
    write_lines(tmp_path / "nodes.csv", node_rows(history.nodes))
    assert cluster_of(str(tmp_path / "nodes.csv")).nodes[0].bandwidth_mbps == 25_000
