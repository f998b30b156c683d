"""The fault laboratory: hundreds of runs of real services under faults, each from one seed."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from typing import NamedTuple

import pytest

from tests.faults.laboratory.command import main, parser
from tests.faults.laboratory.injection.nemesis import FAULTS, RATES
from tests.faults.laboratory.options import Options
from tests.faults.laboratory.parallel import command_of, guarded, rarely_collecting
from tests.faults.laboratory.run import Outcome, live
from tests.support.chance import rate, seeds_for, sure_hits

SEEDS = range(25, 60)
"""In the CI run, beside those of the hunts for mutants. `make chaos` runs as many as it is asked for."""
BESIDE = ((10, "specon"), (23, "specon"), (13, "penstock"), (4, "coda"))
"""Seeds under other profiles than their own, for what is rare."""
SEEDS_AT_LENGTH = range(1_000)
FURTHER = 10_000  # the first seed of those that are run only until all has happened
PARTS = 5
PROMISED_KINDS = 24

RUNS = 333
"""Runs of which the figures below were counted, seeds 0 to 166 and 500 to 665."""
FAULT_HITS = 88
"""Runs in which the rarest kind of fault struck; the others did in up to 133."""
HITS = {
    "void": (2, 295),
    "terms": (5, 313),
    "jobs": (8, 333),
    "refused commits": (2, 94),
    "accepted by operators": (1, 153),
    "freezes": (1, 164),
    "undecided records": (5, 104),
    "changes of cores": (1, 129),
    "caps of memory bandwidth": (1, 55),
    "cores tried": (1, 52),
    "moves that arrived": (1, 27),
    "moves for services": (1, 43),
    "starts at checkpoints": (1, 46),
    "checkpoints fetched": (1, 23),
    "plans of who runs": (2, 38),
    "groups that take turns": (1, 20),
    "processes of the batcher": (2, 144),
    "processes of the migrator": (2, 21),
    "processes of the contention-guard": (2, 29),
    "processes of reporters": (9, 249),
}
"""What must happen, else the runs prove nothing: so often in one run; and the number of runs in which it
did."""
EVENTS: dict[str, tuple[int, float]] = {
    name: (least, rate(hits, RUNS)) for name, (least, hits) in HITS.items()
} | {name: (1, rate(FAULT_HITS, RUNS)) for name in FAULTS if name not in (*RATES, "prelaunch")}
"""How often in one run, and in which part of all runs at least."""


class Rare(NamedTuple):
    """What happens under one profile only, in calm runs oftener than among faults."""

    what: str
    profile: str
    hits: int
    """Of `RARE_RUNS`."""
    first: int
    """A seed in which it did."""


RARE_RUNS = 60
RARE = (
    Rare("jobs judged by convergence", "specon", 8, 8),
    Rare("bursts planned", "penstock", 12, 10),
    Rare("jobs slowed for trainings", "coda", 12, 0),
)
HASHES = """
from tests.faults.laboratory.cell import Options
from tests.faults.laboratory.run import live
print([(o.ledger_hash, o.rule, o.happened) for o in map(live, map(Options, (3, 4, 5)))])
"""


def parts(number: int) -> list[str]:
    return [f"part-{n}-of-{number}" for n in range(1, number + 1)]


def sound(options: Options) -> Outcome:
    """A failure comes with the command that replays it."""
    outcome = guarded(options)
    last = "\n".join(outcome.trace)
    assert not outcome.rule, f"{last}\n{command_of(options)}: {outcome.rule}: {outcome.what}"
    return outcome


def happened(outcome: Outcome) -> list[str]:
    """Of `EVENTS`, what did in this run."""
    counts = {**outcome.happened, "void": outcome.void, "terms": outcome.terms, "jobs": outcome.jobs}
    return [name for name, (least, _) in EVENTS.items() if counts.get(name, 0) >= least]


@pytest.mark.parametrize("part", range(PARTS), ids=parts(PARTS))
def test_every_run_is_sound_and_every_job_comes_to_its_end(part: int, scale: int) -> None:
    """A year of bad luck on small clusters: services die anywhere, machines vanish, zombies decide, disks do
    not sync.

    All of it must really have happened. What is frequent is counted; of the rest each part goes on until it
    has met its share. A sound product misses none of this but once in a million runs of the test.
    """
    seeds = SEEDS if scale == 1 else SEEDS_AT_LENGTH
    runs = [*map(Options, seeds), *(Options(seed, profile=profile) for seed, profile in BESIDE)][part::PARTS]
    share = list(EVENTS)[part::PARTS]
    with rarely_collecting():
        hits = Counter(name for options in runs for name in happened(sound(options)))
        few = {
            name: (hits[name], sure)
            for name, (_, p_hit) in EVENTS.items()
            if hits[name] < (sure := sure_hits(p_hit, len(runs), 2 * len(EVENTS)))
        }
        assert not few, f"(runs in which it happened, in how many it does in any {len(runs)}): {few}"
        _until_met([name for name in share if not hits[name]], part)


def _until_met(missing: Sequence[str], part: int) -> None:
    """Further runs until each of these has happened."""
    left = set(missing)
    most = max((seeds_for(EVENTS[name][1], 2 * len(EVENTS)) for name in left), default=0)
    for seed in islice(count(FURTHER + part, PARTS), most):
        if not left:
            return
        left -= set(happened(sound(Options(seed))))
    assert not left, f"none of {most} runs had any of {left}"


@pytest.mark.parametrize("rare", RARE, ids=parts(len(RARE)))
def test_what_is_rare_happens_too(rare: Rare) -> None:
    """A job that converges while another node is free, a burst that a plan places, a job without GPUs beside
    a training that it slows."""
    most = seeds_for(rate(rare.hits, RARE_RUNS), len(RARE))
    with rarely_collecting():
        assert any(
            sound(Options(seed, (), rare.profile)).happened.get(rare.what, 0)
            for seed in (rare.first, *range(most))
        ), f"{rare.what}: in none of {most} runs"


def test_a_seed_is_a_run_in_any_process() -> None:
    """A failure that cannot be repeated on another machine is a rumour: sets and dicts must not decide
    anything."""
    found = set()
    for hash_seed in ("0", "4711"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", HASHES], env=env, capture_output=True, text=True, check=True
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
