"""The laboratory's command line: one seed in detail, many over all cores, or the mutants.

Exit codes: 0 every run was sound (every mutant was noticed), 1 one was not (with the commands that replay
them), 2 bad options, 130 Ctrl-C.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.scheduling import profiles
from tests.faults.laboratory.injection.nemesis import FAULTS
from tests.faults.laboratory.judging.ending import NAMES, RANDOM
from tests.faults.laboratory.options import LOGS, Options
from tests.faults.laboratory.parallel import (
    COMMAND,
    MUTANT_SEEDS,
    Hunt,
    Summary,
    cores,
    gather,
    guarded,
    hunt_all,
    run_all,
)
from tests.faults.laboratory.patching import MUTANTS
from tests.faults.laboratory.run import Outcome

SOUND, BROKEN, INTERRUPTED = 0, 1, 130
MAX_SEEDS = 1_000_000
MAX_JOBS, MAX_NODES, MAX_STORM_S = 500, 32, 100_000.0


def parser() -> argparse.ArgumentParser:
    """The options; those behind `--faults` override what the seed would choose."""
    found = argparse.ArgumentParser(
        prog=COMMAND,
        description="Runs of a small cell of real services under faults, in virtual time, judged after every "
        "record.",
    )
    what = found.add_mutually_exclusive_group(required=True)
    what.add_argument("--seed", type=int, help="this one run, and how it went")
    what.add_argument("--seeds", type=int, metavar="N", help="N runs over all cores")
    what.add_argument(
        "--mutants", metavar="PART", help="bugs whose name has this part ('' for all): which are noticed"
    )
    found.add_argument(
        "--undirected",
        action="store_true",
        help="with --mutants: runs with all faults, not the mutant's scenario",
    )
    found.add_argument("--first", type=int, default=0, help="seed of the first of them (default 0)")
    found.add_argument(
        "--faults",
        default="all",
        metavar="NAMES",
        help=f"comma-separated, all or none: {', '.join(FAULTS)}",
    )
    found.add_argument("--profile", help="scheduling profile")
    found.add_argument("--jobs", type=int, help="number of jobs")
    found.add_argument("--nodes", type=int, help="number of nodes")
    found.add_argument("--storm", type=float, metavar="SECONDS", help="virtual seconds with faults")
    found.add_argument(
        "--log", choices=sorted(set(LOGS)), help="what the log behaves as (default: by the seed)"
    )
    found.add_argument(
        "--lost",
        metavar="NAMES",
        help=f"services that die for good, {RANDOM} or comma-separated: {', '.join(NAMES)}",
    )
    found.add_argument(
        "--trace", action="store_true", help="with --seed: what happened last, also of a sound run"
    )
    found.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return found


def problems_of(given: argparse.Namespace, faults: Sequence[str]) -> list[str]:
    """All that is wrong with the options."""
    found = [f"--faults: {name!r} is not one of {', '.join(FAULTS)}" for name in faults if name not in FAULTS]
    lost = [] if given.lost in (None, RANDOM) else given.lost.split(",")
    found += [f"--lost: {name!r} is not one of {', '.join(NAMES)}" for name in lost if name not in NAMES]
    if given.profile is not None and given.profile not in profiles.names():
        found.append(f"--profile: {given.profile!r} is not one of {', '.join(profiles.names())}")
    for name, low, high in (
        ("seed", 0, 1 << 53),
        ("first", 0, 1 << 53),
        ("seeds", 1, MAX_SEEDS),
        ("jobs", 1, MAX_JOBS),
        ("nodes", 1, MAX_NODES),
        ("storm", 0.0, MAX_STORM_S),
    ):
        value = getattr(given, name)
        if value is not None and not low <= value <= high:
            found.append(f"--{name}: {value} is not between {low} and {high}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; argparse ends bad options with 2."""
    options_of = parser()
    given = options_of.parse_args(arguments)
    named = {"all": tuple(FAULTS), "none": ()}.get(given.faults)
    faults = tuple(given.faults.split(",")) if named is None else named
    problems = problems_of(given, faults)
    if problems:
        options_of.error("; ".join(problems))
    as_json = given.output == "json"
    if given.mutants is not None:
        names = [name for name in MUTANTS if given.mutants in name]
        return _mutants(names, directed=not given.undirected, as_json=as_json)
    faults = tuple(name for name in FAULTS if name in faults)
    options = Options(
        given.seed or 0,
        faults,
        given.profile,
        given.jobs,
        given.nodes,
        given.storm,
        given.log,
        given.lost,
    )
    if given.seed is not None:
        return _one(guarded(options), as_json=as_json, trace=given.trace)
    return _many(options, given.first, given.seeds, as_json=as_json)


def _one(outcome: Outcome, *, as_json: bool, trace: bool) -> int:
    if as_json:
        print(json.dumps({**outcome._asdict(), "happened": dict(outcome.happened)}, indent=1))
        return BROKEN if outcome.rule else SOUND
    if outcome.rule or trace:
        print("\n".join(outcome.trace))
    print(
        f"seed {outcome.seed}, {outcome.profile}: {outcome.records} records ({outcome.void} void) in "
        f"{outcome.terms} terms, {outcome.jobs} jobs ended in {outcome.virtual_s:.0f} s; "
        f"ledger {outcome.ledger_hash}"
    )
    if outcome.rule:
        print(f"BROKEN  {outcome.rule}: {outcome.what}")
        return BROKEN
    print("sound")
    return SOUND


def _many(options: Options, first: int, seeds: int, *, as_json: bool) -> int:
    runs = [options._replace(seed=seed) for seed in range(first, first + seeds)]
    began_s = time.perf_counter()  # clock: it is shown, and judges nothing
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[broken]} broken"),
        TimeRemainingColumn(),
    )
    broken = 0
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("runs", total=seeds, broken=0)

        def advance(outcome: Outcome) -> None:
            nonlocal broken
            broken += bool(outcome.rule)
            progress.update(task, advance=1, broken=broken)

        summary = gather(run_all(runs, cores()), advance, options)
    seconds = time.perf_counter() - began_s  # clock: it is shown, and judges nothing
    if as_json:
        print(json.dumps({**summary._asdict(), "seconds": round(seconds, 1)}, indent=1))
    else:
        _table(summary, seconds)
    if summary.runs < seeds:
        return INTERRUPTED
    return BROKEN if summary.failures else SOUND


def _table(summary: Summary, seconds: float) -> None:
    console = Console()
    table = Table("what", "count", title=f"{summary.runs} runs in {seconds:.1f} s")
    for name, value in (
        ("jobs ended", summary.jobs),
        ("records", summary.records),
        ("void records", summary.void),
        ("terms", summary.terms),
        ("virtual hours", round(summary.virtual_s / 3_600)),
        *summary.happened.items(),
        *((f"runs under {name}", count) for name, count in summary.profiles.items()),
        ("broken", len(summary.failures)),
    ):
        table.add_row(name, f"{value:,}")
    console.print(table)
    for failure in summary.failures:
        print(f"BROKEN  {failure['rule']}: {failure['what']}\n        {failure['command']}")


def _mutants(names: Sequence[str], *, directed: bool, as_json: bool) -> int:
    def advance(hunt: Hunt) -> None:
        print(f"{hunt.name:58} {hunt.rule or 'SURVIVED':10} {hunt.seed:4}  {hunt.what[:90]}", file=sys.stderr)

    found = hunt_all(names, MUTANT_SEEDS, advance, directed=directed)
    if as_json:
        print(json.dumps([result._asdict() for result in found], indent=1))
    noticed = sum(bool(result.rule) for result in found)
    print(f"{noticed} of {len(found)} mutants noticed", file=sys.stderr)
    return SOUND if noticed == len(found) else BROKEN
