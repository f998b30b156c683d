"""The fault laboratory: hundreds of runs of real services under faults, each from one seed."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.laboratory.cell import Options
from tests.faults.laboratory.command import main, parser
from tests.faults.laboratory.nemesis import FAULTS, RATES
from tests.faults.laboratory.parallel import Summary, cores, gather, run_all
from tests.faults.laboratory.run import live

SEEDS = range(25, 60)
"""In the CI run, beside those of the hunts for mutants: short runs in which, together, all faults and what is rare happen.
`make chaos` runs as many as it is asked for."""
BESIDE = ((10, "specon"), (23, "specon"), (13, "penstock"), (4, "coda"))
"""Seeds under other profiles than their own, for what is rare: a job that converges while another node is free, a burst that a plan places, a job
without GPUs beside a training that it slows."""
SEEDS_AT_LENGTH = range(1_000)
PROMISED_KINDS = 24
HASHES = """
from tests.faults.laboratory.cell import Options
from tests.faults.laboratory.run import live
print([(o.ledger_hash, o.rule, o.happened) for o in map(live, map(Options, (3, 4, 5)))])
"""


@pytest.mark.timeout(1_200)
def test_every_run_is_sound_and_every_job_comes_to_its_end(scale: int) -> None:
    """A year of bad luck on small clusters: services die anywhere, machines vanish, zombies decide, disks do not sync.

    A failure comes with the command that replays it.
    """
    seeds = SEEDS if scale == 1 else SEEDS_AT_LENGTH
    runs = [*map(Options, seeds), *(Options(seed, profile=profile) for seed, profile in BESIDE)]
    summary = gather(run_all(runs, cores()), lambda outcome: None, Options(0))
    assert summary.runs == len(runs)
    assert not summary.failures, "\n".join(
        f"{f['command']}: {f['rule']}: {f['what']}" for f in summary.failures
    )
    _was_bad(summary)


def _was_bad(summary: Summary) -> None:
    """All of it must really have happened, else the runs prove nothing."""
    happened = summary.happened
    assert set(FAULTS) - set(RATES) <= set(happened), "some faults never struck"
    assert summary.void > summary.runs, "no zombie wrote anything"
    assert summary.terms > 4 * summary.runs
    assert happened["refused commits"] > summary.runs, "no placer lost its offset to another"
    assert happened["accepted by operators"] > summary.runs // 8, "no placer stopped before a changed topic"
    assert happened["freezes"] > summary.runs // 10
    assert happened["undecided records"] > 4 * summary.runs
    assert happened["changes of cores"] > summary.runs // 2
    assert happened["caps of memory bandwidth"] > summary.runs // 5
    assert happened["moves that arrived"] > summary.runs // 20
    assert happened["starts at checkpoints"] > summary.runs // 10
    assert happened["processes of the batcher"] > summary.runs, "it was never killed"
    assert happened["processes of the migrator"] > summary.runs // 8, "it was never killed"
    assert happened["processes of the contention-guard"] > summary.runs // 8, "it was never killed"
    assert happened["cores tried"] > 0
    assert happened["jobs slowed for trainings"] > 0
    assert happened["jobs judged by convergence"] > 0
    assert happened["moves for services"] > 0
    assert happened["plans of who runs"] > summary.runs
    assert happened["groups that take turns"] > summary.runs // 20
    assert happened["bursts planned"] > 0
    assert happened["checkpoints fetched"] > summary.runs // 40
    assert happened["processes of reporters"] > 8 * summary.runs
    assert summary.jobs > 8 * summary.runs


def test_a_seed_is_a_run_in_any_process() -> None:
    """A failure that cannot be repeated on another machine is a rumour: sets and dicts must not decide anything."""
    found = set()
    for hash_seed in ("0", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, timeout=100, check=True
        )
        found.add(done.stdout)
    assert len(found) == 1


def test_the_replay_command_repeats_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """What a failure prints is pasted into a shell a week later."""
    options = Options(17, ("steps", "crash", "reboot"), profile="srtf", jobs=5, nodes=3, storm_s=40.0)
    assert main([*options.arguments().split(), "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ledger_hash"] == live(options).ledger_hash
    assert printed["profile"] == "srtf"


def test_a_run_without_faults_is_calm() -> None:
    """With `--faults none` nobody dies and nothing is void: what is left is the plain life of a cell."""
    outcome = live(Options(8, ()))
    assert (outcome.rule, outcome.void) == ("", 0)
    assert outcome.happened["processes of placers"] == 2
    assert outcome.jobs >= 8


def test_bad_options_are_reported_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody mistypes the replay of a colleague."""
    with pytest.raises(SystemExit) as ended:
        main(["--seed", "1", "--faults", "crash,crsh", "--profile", "srft", "--jobs", "0"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    for part in ("'crsh'", "'srft'", "--jobs: 0"):
        assert part in printed


def test_every_fault_has_a_name_on_the_command_line() -> None:
    """A failure is reduced by leaving faults out, one after another."""
    assert len(FAULTS) >= PROMISED_KINDS
    for name in FAULTS:
        assert name in parser().format_help()
