"""The laboratory: hundreds of lives in which everything goes wrong that may, each from one seed."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.lab.command import main, parser
from tests.faults.lab.crowd import Summary, cores, gather, live_all
from tests.faults.lab.life import Options, live
from tests.faults.lab.nemesis import FAULTS, WEATHER

SEEDS = 500
HASHES = """
from tests.faults.lab.life import Options, live
print([(o.ledger_hash, o.judge, o.happened) for o in map(live, map(Options, (3, 4, 5, 6)))])
"""


@pytest.mark.timeout(400)
def test_every_life_is_sound_and_every_job_comes_to_its_end() -> None:
    """A year of bad luck on small clusters: services die anywhere, machines vanish, zombies decide, clocks jump.

    A failure is told with the command that replays it.
    """
    lives = [Options(seed) for seed in range(SEEDS)]
    summary = gather(live_all(lives, cores()), lambda outcome: None, Options(0))
    assert summary.lives == SEEDS
    assert not summary.failures, "\n".join(
        f"{f['command']}: {f['judge']}: {f['what']}" for f in summary.failures
    )
    _was_bad(summary)


def _was_bad(summary: Summary) -> None:
    """All of it must really have happened, else the lives prove nothing."""
    happened = summary.happened
    assert set(FAULTS) - set(WEATHER) <= set(happened), "some faults never struck"
    assert summary.void > SEEDS, "no zombie wrote anything"
    assert happened["placers replaced"] > SEEDS
    assert happened["freezes"] > SEEDS // 10
    assert happened["lives of reporters"] > 10 * SEEDS
    assert summary.jobs > 8 * SEEDS


def test_a_seed_is_a_life_in_any_process() -> None:
    """A failure that cannot be repeated on another machine is a rumour: sets and dicts must not decide anything."""
    told = set()
    for hash_seed in ("0", "1", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        found = subprocess.run(
            [sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, timeout=100, check=True
        )
        told.add(found.stdout)
    assert len(told) == 1


def test_the_replay_command_lives_the_same_life(capsys: pytest.CaptureFixture[str]) -> None:
    """What a failure prints is pasted into a shell a week later."""
    options = Options(17, ("turns", "crash", "reboot"), profile="srtf", jobs=5, nodes=3, storm_s=40.0)
    assert main([*options.arguments().split(), "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ledger_hash"] == live(options).ledger_hash
    assert told["profile"] == "srtf"


def test_a_life_without_faults_is_calm() -> None:
    """With `--faults none` nobody dies and nothing is void: what is left is the plain life of a cell."""
    outcome = live(Options(8, ()))
    assert (outcome.judge, outcome.void) == ("", 0)
    assert outcome.happened["lives of placers"] == 2
    assert outcome.jobs >= 8


def test_bad_options_are_told_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Somebody mistypes the replay of a colleague."""
    with pytest.raises(SystemExit) as ended:
        main(["--faults", "crash,crsh", "--profile", "srft", "--jobs", "0"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    for part in ("either --seed or --seeds", "'crsh'", "'srft'", "--jobs: 0"):
        assert part in told


def test_every_fault_has_a_name_on_the_command_line() -> None:
    """A failure is reduced by leaving faults out, one after another."""
    for name in FAULTS:
        assert name in parser().format_help()
