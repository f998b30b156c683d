"""Comparing policies: which is better, how sure that is, and what becomes of it when somebody presses
Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console
from scipy import stats

from penstock.cli.app import run as main
from penstock.simulator.commands.output import comparison_keys, print_comparison, print_stopped
from penstock.simulator.comparison import CLOCKED, compare
from penstock.simulator.parallel import Failed, Look, Task, run_all
from penstock.simulator.runs import OnProgress, Progress, Recorder, Result, perform
from penstock.simulator.statistics import Mean, mean_of, paired
from tests.simulation.scenarios import BUSY, simulation
from tests.support.waiting import wait_until

AFTERNOON = "job_id,submit_s,duration_s,gpus\n" + "".join(
    f"{one.job_id},{one.submit_s},{one.duration_s},{one.gpus}\n" for one in BUSY
)


def perform_busy(task: Task, report: OnProgress) -> Result:
    recorder = Recorder()
    return perform(
        simulation(BUSY, task.profile, "2x4+1x8", sink=recorder.take, seed=task.seed), recorder, report
    )


def answer_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    """Exit code and JSON of a command run in this process."""
    code = main([*arguments, "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def afternoon(tmp_path: Path) -> str:
    path = tmp_path / "afternoon.csv"
    path.write_text(AFTERNOON)
    return str(path)


# ----------------------------------------------------------------------------------------- statistics


def test_intervals_are_students() -> None:
    """Ten seeds gave ten means; a statistician checks the interval with another library."""
    values = np.random.default_rng(1).normal(1_000.0, 50.0, size=10).tolist()
    found = mean_of(values)
    low, high = stats.t.interval(0.95, 9, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    assert found.n == 10


def test_paired_differences_are_narrower_than_the_means() -> None:
    """Two policies on ten generated days: the days differ much, the policies a little, and always the same
    way."""
    rng = np.random.default_rng(2)
    days = rng.normal(1_000.0, 200.0, size=10)
    first = dict(enumerate((days + rng.normal(0.0, 2.0, size=10)).tolist()))
    second = dict(enumerate((days - 10 + rng.normal(0.0, 2.0, size=10)).tolist()))
    found = paired(second, first, exact=(False, False))
    assert found is not None
    interval = stats.ttest_rel(list(second.values()), list(first.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.high < 0, "sure: the second is better"
    assert mean_of(list(first.values())).meets(mean_of(list(second.values()))), "which the means alone hide"


def test_one_run_has_no_interval() -> None:
    """Somebody in a hurry runs one seed of a policy with random numbers: there is no interval, not one of
    width 0."""
    assert mean_of([5.0]) == Mean(5.0, None, 1)
    assert mean_of([5.0], exact=True) == Mean(5.0, 0.0, 1)
    assert paired({0: 7.0, 1: 9.0}, {0: 5.0}, exact=(False, True)) == mean_of([2.0, 4.0])
    assert paired({3: 7.0}, {0: 5.0}, exact=(False, False)) is None


# ------------------------------------------------------------------------------------------------ runs


def test_a_deterministic_policy_runs_once(capsys: pytest.CaptureFixture[str], afternoon: str) -> None:
    """Nobody waits for ten equal runs of srtf; random gets its ten, seed by seed those of `simulate
    --seed`."""
    code, found = answer_of(
        capsys,
        "compare",
        afternoon,
        "--cluster",
        "2x4+1x8",
        "--profiles",
        "srtf,random",
        "--seeds",
        "4",
        "--seed",
        "3",
        "--durations",
        "known",
    )
    assert code == 0
    assert found["first"] == "srtf"
    srtf, random = found["profiles"]["srtf"], found["profiles"]["random"]
    assert (srtf["runs"], srtf["deterministic"]) == (1, True)
    assert srtf["means"]["avg_jct_s"]["half_width"] == 0
    assert srtf["means"]["events_per_s"]["half_width"] is None, "a clock measured it: one run has no spread"
    assert (random["runs"], random["deterministic"]) == (4, False)
    assert random["means"]["avg_jct_s"]["half_width"] > 0
    assert random["differences"]["avg_jct_s"]["n"] == 4
    assert [(run["profile"], run["seed"]) for run in found["runs"]] == [
        ("srtf", 3),
        ("random", 3),
        ("random", 4),
        ("random", 5),
        ("random", 6),
    ]
    one = found["runs"][2]
    code, alone = answer_of(
        capsys, "simulate", afternoon, "--cluster", "2x4+1x8", "--profile", "random", "--seed", "4"
    )
    assert alone.keys() - one.keys() == {"assumptions"}
    alone = {key: alone[key] for key in one}
    assert {key: alone[key] for key in alone.keys() - CLOCKED} == {
        key: one[key] for key in one.keys() - CLOCKED
    }


def test_how_many_run_at_once_is_no_matter(capsys: pytest.CaptureFixture[str], afternoon: str) -> None:
    """A laptop and a server with many cores must give the same."""
    answers = []
    for jobs in ("1", "5"):
        arguments = ("--cluster", "2x4+1x8", "--profiles", "random,fifo,even", "--seeds", "3", "--jobs", jobs)
        _, found = answer_of(capsys, "compare", afternoon, *arguments)
        for run in found["runs"]:
            for key in CLOCKED:
                del run[key]
        for profile in found["profiles"].values():
            for key in CLOCKED:
                del profile["means"][key]
        answers.append(found)
    assert answers[0] == answers[1]


def test_a_seed_makes_the_day_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    """On a generated workload even fifo has as many results as seeds, and all policies see the same days."""
    _, found = answer_of(capsys, "compare", "poisson/2-per-hour", "--profiles", "fifo,srtf", "--seeds", "3")
    fifo, srtf = found["profiles"]["fifo"], found["profiles"]["srtf (learned)"]
    assert (fifo["runs"], fifo["deterministic"]) == (3, False)
    assert srtf["differences"]["events"] == {"mean": 0.0, "half_width": 0.0, "n": 3}
    assert len({run["avg_jct_s"] for run in found["runs"] if run["profile"] == "fifo"}) == 3


def test_the_table_marks_the_best_and_those_apart() -> None:
    """Three policies: one best, one whose interval meets it, one clearly worse."""
    shift = {"srtf": 0, "random": 0, "even": 900}

    def moved(task: Task) -> Result:
        """A run whose mean lies where the test needs it; `random` varies widely."""
        found = perform_busy(task, lambda progress: True)
        mean_s = 100.0 + shift[task.profile] + (40.0 * task.seed if task.profile == "random" else task.seed)
        return _with(found, figures=found.figures._replace(avg_jct_s=mean_s), used_rng=True)

    results = [moved(Task(profile, seed, False)) for profile in shift for seed in range(3)]
    out = Console(file=io.StringIO(), width=120)
    print_comparison(compare(shift, results, seeded=False), out)
    assert isinstance(out.file, io.StringIO)
    row = next(line for line in out.file.getvalue().splitlines() if line.startswith("avg_jct_s"))
    assert row.split() == ["avg_jct_s", "101.0", "s", "★", "140.0", "s", "1,001.0", "s", "▼"]


def _with(result: Result, **changes: Any) -> Result:
    return Result(**{name: getattr(result, name) for name in Result.__slots__} | changes)


# ------------------------------------------------------------------------------------- what goes wrong


def hangs(profile: str, note: Path) -> Callable[[Task, OnProgress], Result]:
    """Work that never ends under this profile; its process writes its id into `note`."""

    def do(task: Task, report: OnProgress) -> Result:
        if task.profile == profile:
            note.with_suffix(".new").write_text(str(os.getpid()))
            note.with_suffix(".new").rename(note)
            while True:
                signal.pause()
        return perform_busy(task, report)

    return do


def test_ctrl_c_keeps_what_was_finished(tmp_path: Path) -> None:
    """Two policies are done, the third takes hours: Ctrl-C, and the two are reported; the third's process is
    gone."""
    note = tmp_path / "pid"

    def look(seen: Look) -> None:
        if seen.done == 2 and note.exists():
            raise KeyboardInterrupt

    tasks = [Task(profile, 0, False) for profile in ("fifo", "even", "srtf")]
    outcome = run_all(tasks, hangs("even", note), 2, look=look)
    assert outcome.interrupted
    assert sorted(result.profile for result in outcome.results) == ["fifo", "srtf"]
    standings = compare(["fifo", "even", "srtf"], outcome.results, seeded=False)
    assert [standing.name for standing in standings] == ["fifo", "srtf"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_run_that_dies_is_reported_and_ends_no_other() -> None:
    """The machine runs out of memory and kills one of the processes."""

    def do(task: Task, report: OnProgress) -> Result:
        if task.profile == "even":
            os.kill(os.getpid(), signal.SIGKILL)
        return perform_busy(task, report)

    tasks = [Task(profile, 0, False) for profile in ("fifo", "even", "srtf")]
    outcome = run_all(tasks, do, 3)
    assert sorted(result.profile for result in outcome.results) == ["fifo", "srtf"]
    assert outcome.failed == [Failed(tasks[1], "its process ended with code -9")]
    assert not outcome.interrupted


def started(*arguments: str) -> "subprocess.Popen[str]":
    """A command in a session of its own, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_stopped_simulation_gives_the_report_so_far(tmp_path: Path, number: int) -> None:
    """A simulation of weeks, stopped in the middle: figures, a page that states it, exit code 130."""
    ledger, page = tmp_path / "ledger.jsonl", tmp_path / "page.html"
    arguments = (
        "simulate",
        "poisson/900-per-hour",
        "--cluster",
        "1x8",
        "--profile",
        "fifo",
        "--ledger",
        str(ledger),
        "-o",
        "json",
        *(("--report", str(page)) if number == signal.SIGINT else ()),
    )
    with started(*arguments) as run:

        def half_way() -> bool:
            assert run.poll() is None, "it ended before it could be stopped"
            return ledger.exists() and ledger.stat().st_size >= 100_000

        wait_until(half_way, "a ledger of some size")
        run.send_signal(number)
        out, errors = run.communicate()
    assert run.returncode == 130, errors
    found = json.loads(out)
    assert found["interrupted"]
    assert found["unfinished_jobs"] > 0
    assert ledger.read_text().endswith("\n"), "the ledger ends with a whole record"
    assert len(ledger.read_text().splitlines()) == found["records"]
    assert number != signal.SIGINT or "Stopped before its end" in page.read_text()


def running_children(run: "subprocess.Popen[str]", count: int, busy_s: float) -> None:
    """Waits until the command has so many processes, each of which has computed for so long."""

    def running() -> bool:
        assert run.poll() is None, "it ended before it could be stopped"
        children = psutil.Process(run.pid).children()
        return len(children) == count and all(one.cpu_times().user > busy_s for one in children)

    wait_until(running, f"{count} processes that compute")


@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_stopped_comparison_keeps_the_figures_of_the_runs_in_progress(
    tmp_path: Path, number: int, group: bool
) -> None:
    """Two runs in progress, a third waits: Ctrl-C reaches all processes of the terminal, a deadline's SIGTERM
    only one."""
    trace, page = tmp_path / "long.csv", tmp_path / "page.html"
    lines = [f"j{n},{n // 4},{300 + n % 97},1" for n in range(20_000)]
    trace.write_text("job_id,submit_s,duration_s,gpus\n" + "\n".join(lines))
    arguments = (
        "compare",
        str(trace),
        "--cluster",
        "1x8",
        "--profiles",
        "random,even,srtf",
        "--seeds",
        "1",
        "--jobs",
        "2",
        "--check",
        "-o",
        "json",
        *(("--report", str(page)) if group else ()),
    )
    with started(*arguments) as run:
        running_children(run, 2, 0.5)
        (os.killpg if group else os.kill)(run.pid, number)
        out, errors = run.communicate()
    assert run.returncode == 130, errors
    found = json.loads(out)
    assert (found["interrupted"], found["profiles"]) == (True, {}), "no mean mixes them with whole runs"
    assert [(one["profile"], one["interrupted"]) for one in found["runs"]] == [
        ("even", True),
        ("random", True),
    ]
    for one in found["runs"]:
        assert one["records"] > 0
        assert one["unfinished_jobs"] > 0
        assert len(one["ledger_hash"]) == 32
    assert "Traceback" not in errors
    if group:
        text = page.read_text()
        assert "Stopped before its end" in text
        assert "srtf" in text.partition("Nothing is known of")[2][:40]


def test_a_stopped_comparison_shows_whole_runs_and_those_in_progress(tmp_path: Path) -> None:
    """fifo had ended, srtf had not: fifo's means stand as ever, srtf's figures so far stand apart from
    them."""

    def do(task: Task, report: OnProgress) -> Result:
        if task.profile == "fifo":
            return perform_busy(task, report)
        while report(Progress(0.5, 1, 2, 0.1)):
            time.sleep(0.01)  # clock: between two reports, until one of them is answered with a stop
        found = perform_busy(task, lambda progress: False)
        return _with(found, interrupted=True)

    def look(seen: Look) -> None:
        if seen.done == 1 and any(seen.running.values()) and not pressed:
            pressed.append(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    pressed: list[int] = []
    tasks = [Task("fifo", 0, True), Task("srtf", 0, True)]
    handler = signal.getsignal(signal.SIGTERM)  # an event loop of an earlier test may have left one
    outcome = run_all(tasks, do, 2, look=look)
    assert outcome.interrupted
    assert not outcome.failed
    standings = compare(["fifo", "srtf"], outcome.results, seeded=False)
    assert [standing.name for standing in standings] == ["fifo"]
    keys = comparison_keys(standings, outcome.results, 0, outcome.interrupted, {})
    assert [(one["profile"], one["interrupted"]) for one in keys["runs"]] == [("fifo", False), ("srtf", True)]
    out = Console(file=io.StringIO(), width=120)
    print_comparison(standings, out)
    print_stopped(outcome.results, out)
    assert isinstance(out.file, io.StringIO)
    lines = out.file.getvalue().splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("stopped before its end"))
    assert [line.split()[-1] for line in lines[head - 1 : head + 2]] == ["srtf", "0", str(len(BUSY))]
    assert signal.getsignal(signal.SIGTERM) == handler, "its own handler is gone again"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profiles", "fifo,lifo"), "lifo"),
        (("--profiles", "fifo,fifo"), "fifo twice"),
        (("--profiles", ","), "name at least one"),
        (("--profiles", "fifo", "--seeds", "0"), "--seeds: between 1 and"),
        (("--profiles", "fifo", "--jobs", "0"), "--jobs: between 1 and"),
        (("--profiles", "fifo", "--truth", "rumour"), "rumour"),
        (("--profiles", "fifo", "--report", "nowhere/page.html"), "there is no folder nowhere"),
        (("--profiles", "fifo", "--cluster", "1x4"), "8 GPUs"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], afternoon: str, arguments: Sequence[str], message: str
) -> None:
    """A typo in the last option must not show after an hour."""
    assert main(["compare", afternoon, "--cluster", "2x4+1x8", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock: ")
    assert message in captured.err
