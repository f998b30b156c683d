"""What a comparison assumes: run times that policies are given, what restarts cost, and that every output
states it."""

import json
from pathlib import Path

import msgspec
import pytest

from penstock.cli.app import run as main
from penstock.model.decisions.ledger_events import TermStarted
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import wire_type
from penstock.scheduling import profiles
from penstock.scheduling.profiles import reads_run_times
from penstock.simulator.engine import Durations, Options
from penstock.simulator.report.measured import measured
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import BUSY, CLUSTER, ends, job, simulation
from tests.support.cluster.hand_placer import HandPlacer, estimate, node_spec

WAYS: tuple[Durations, ...] = ("known", "learned", "unknown")


@pytest.mark.parametrize("profile", profiles.names())
def test_only_some_policies_read_run_times(profile: str) -> None:
    """The table of those that do is what `compare` goes by: all others would end each job at the same moment
    twice."""
    known, unknown = (
        ends(simulation(BUSY, profile, CLUSTER, Options(durations=way))) for way in ("known", "unknown")
    )
    assert (known != unknown) == (reads_run_times(profile))


def repeated(count: int, duration_s: float, owner: str, first_s: float) -> list[TraceJob]:
    """One owner's training, again and again, in turn."""
    return [
        TraceJob(
            f"{owner}-{n}", first_s + n * (duration_s + 10), duration_s, 1, model=f"net-{owner}", owner=owner
        )
        for n in range(count)
    ]


def test_run_times_are_learned_from_the_runs_that_have_ended() -> None:
    """Two owners train their own networks over and over, for 100 s and for 1,000 s. The first run of each has
    no estimate; then the median of the owner's own runs is one, and no later run is known before it has
    ended."""
    records: list[bytes] = []
    jobs = [*repeated(4, 100.0, "ada", 0.0), *repeated(3, 1_000.0, "bob", 5.0)]
    found = simulation(jobs, "srtf", "1x4", Options(durations="learned"), records.append)
    ends(found)
    estimates: dict[str, float | None] = {}
    done: dict[str, int] = {"ada": 0, "bob": 0}
    for value in records:
        for fact in json.loads(value)["facts"]:
            if fact["type"] == wire_type(JobEstimated):
                job_id, owner = fact["data"]["job_id"], fact["data"]["job_id"].partition("-")[0]
                run_ms = fact["data"]["estimate"].get("run_ms")
                estimates[job_id] = run_ms
                assert (run_ms is not None) == (done[owner] > 0), (
                    f"{job_id}: an estimate from nowhere, or none"
                )
            if fact["type"] == wire_type(TaskExited):
                done[fact["data"]["task_id"].partition("-")[0]] += 1
    assert estimates == {
        "ada-0": None,
        "ada-1": 100_000,
        "ada-2": 100_000,
        "ada-3": 100_000,
        "bob-0": None,
        "bob-1": 1_000_000,
        "bob-2": 1_000_000,
    }


def test_what_was_learned_orders_the_queue() -> None:
    """A long and a short training wait for the one GPU. Unknown, the older goes first; learned and known, the
    short one."""
    before = [
        TraceJob("long-0", 0.0, 500.0, 1, model="long", owner="ada"),
        TraceJob("short-0", 0.0, 50.0, 1, model="short", owner="ada"),
    ]
    waiting = [
        TraceJob("long-1", 600.0, 500.0, 1, model="long", owner="ada"),
        TraceJob("short-1", 601.0, 50.0, 1, model="short", owner="ada"),
    ]
    first = [job("blocker", 599.0, 30.0)]
    found = {
        way: ends(simulation([*before, *first, *waiting], "sjf", "1x1", Options(durations=way)))
        for way in WAYS
    }
    assert found["unknown"]["long-1"] < found["unknown"]["short-1"]
    for way in ("learned", "known"):
        assert found[way]["short-1"] < found[way]["long-1"], way


def test_every_output_states_what_it_assumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, a page and JSON are passed on: each states what no cluster will do for them."""
    trace, page = tmp_path / "trace.csv", tmp_path / "page.html"
    rows = "".join(f"{one.job_id},{one.submit_s},{one.duration_s},{one.gpus}\n" for one in BUSY)
    trace.write_text("job_id,submit_s,duration_s,gpus\n" + rows)
    both = ("compare", str(trace), "--cluster", CLUSTER, "--profiles", "fifo,srtf", "--seeds", "1")
    assert main([*both, "--truth", "phases(launch_s=12)", "--start-latency", "3", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["profiles"]) == ["fifo", "srtf (learned)", "srtf (known)"]
    assert [one["durations"] for one in found["profiles"].values()] == [None, "learned", "known"]
    means = [one["means"]["avg_jct_s"]["mean"] for one in found["profiles"].values()]
    assert means[2] < means[1], "an oracle does better"
    assert [(run["profile"], run["durations"]) for run in found["runs"]] == [
        ("fifo", None),
        ("srtf", "learned"),
        ("srtf", "known"),
    ]
    words = found["assumptions"]
    assert words["run_times"].startswith("fifo: not read; srtf (learned): learned by the estimator")
    assert words["restarts"].startswith("Each start costs 12 s, each end 5 s for saving")
    assert "a task starts 3 s after its order" in words["latency"]
    assert main([*both, "--durations", "unknown", "--report", str(page)]) == 0
    table = capsys.readouterr().out
    for text in (table, page.read_text()):
        assert "Restarts: Free: a job starts in no time" in text
        assert "Run times: fifo: not read; srtf: unknown to the policy." in text
    assert main(["simulate", str(trace), "--cluster", CLUSTER, "--profile", "srtf", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["durations"] == "learned", "as in a cell, unless asked for otherwise"
    assert "learned by the estimator" in found["assumptions"]["run_times"]


def test_a_ledger_states_what_its_figures_rest_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is passed on without its command line: whether it was simulated, and what was known, stands in
    its records."""
    trace, ledger, page = (tmp_path / name for name in ("trace.csv", "ledger.jsonl", "page.html"))
    rows = "".join(f"{one.job_id},{one.submit_s},{one.duration_s},{one.gpus},ada\n" for one in BUSY)
    trace.write_text("job_id,submit_s,duration_s,gpus,owner\n" + rows)
    run = (
        "simulate",
        str(trace),
        "--cluster",
        CLUSTER,
        "--truth",
        "phases(launch_s=12)",
        "--start-latency",
        "3",
    )
    found = {}
    for profile, way in (("fifo", "known"), *(("srtf", way) for way in WAYS)):
        assert (
            main([*run, "--profile", profile, "--durations", way, "--ledger", str(ledger), "-o", "json"]) == 0
        )
        simulated = json.loads(capsys.readouterr().out)["assumptions"]
        assert main(["report", str(ledger), "--report", str(page), "-o", "json"]) == 0
        found[profile, way] = json.loads(capsys.readouterr().out)["assumptions"]
        assert found[profile, way]["run_times"].startswith(simulated["run_times"].rstrip(".")), way
        assert found[profile, way]["run_times"] in page.read_text()
    assert found["srtf", "learned"]["run_times"].endswith(" of 40 jobs had one.")
    assert len({one["run_times"] for one in found.values()}) == 4
    stated = found["fifo", "known"]
    assert stated["times"].startswith("Simulated: no cell ran these jobs")
    assert stated["decided_by"] == "fifo."
    assert stated["restarts"] == (
        "Measured: 40 starts took 3 s from placement until all tasks ran; 15 s until the training began, "
        "of 40 that reported it; saving took 5 s; 0 preemptions."
    )
    assert main(["report", str(ledger)]) == 0
    assert "Times: Simulated: no cell ran" in capsys.readouterr().out


def test_a_cell_s_report_names_its_placers_and_how_many_run_times_were_estimated() -> None:
    """The profile was changed on Tuesday, and one of three jobs had been run before."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 2))
    placer.run(["first"])
    settings = msgspec.structs.replace(placer.state.settings, profile="srtf")
    placer.feed(TermStarted(term=2, placer_id="placer-2", settings=settings, code_version="0.2"))
    placer.submit("second")
    timeline = Timeline()
    for value in placer.values:
        timeline.take(value)
    found = measured(timeline, live=True)
    assert found["times"] == "Measured by the placer's clock, from the first record to now."
    assert found["decided_by"].startswith("fifo up to record ")
    assert found["decided_by"].endswith("; srtf of penstock 0.2.")
    assert found["run_times"] == "srtf: unknown to the policy."
    before = len(placer.values)
    placer.feed(JobSubmitted(job_id="third", spec=JobSpec(command=("true",))))
    placer.feed(JobEstimated(job_id="third", estimate=msgspec.structs.replace(estimate(), run_ms=5_000)))
    for value in placer.values[before:]:
        timeline.take(value)
    assert measured(timeline, live=True)["run_times"] == "srtf: estimated for 1 of 3 jobs."
