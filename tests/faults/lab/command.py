"""The laboratory's command line: one seed in detail, or many over all cores.

Exit codes: 0 every life was sound, 1 one was not (with the commands that replay them), 2 bad options, 130 Ctrl-C.
"""

import argparse
import json
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from penstock.policies.profiles import PROFILES
from tests.faults.lab.crowd import Summary, cores, gather, guarded, live_all
from tests.faults.lab.life import Options, Outcome
from tests.faults.lab.nemesis import FAULTS

SOUND, BROKEN, INTERRUPTED = 0, 1, 130
MAX_SEEDS = 1_000_000
MAX_JOBS, MAX_NODES, MAX_STORM_S = 500, 32, 100_000.0


def parser() -> argparse.ArgumentParser:
    """The options; every one but the first three overrides what the seed would draw."""
    found = argparse.ArgumentParser(
        prog="python -m tests.faults.lab",
        description="Lives of a small cell in which everything goes wrong that may; judged after every record.",
    )
    found.add_argument("--seed", type=int, help="live this one life and tell how it went")
    found.add_argument("--seeds", type=int, metavar="N", help="live N lives over all cores")
    found.add_argument("--first", type=int, default=0, help="seed of the first of them (default 0)")
    found.add_argument(
        "--faults", default="all", metavar="NAMES", help=f"comma-separated, all or none: {', '.join(FAULTS)}"
    )
    found.add_argument("--profile", help="scheduling profile")
    found.add_argument("--jobs", type=int, help="number of jobs")
    found.add_argument("--nodes", type=int, help="number of nodes")
    found.add_argument("--storm", type=float, metavar="SECONDS", help="virtual seconds with faults")
    found.add_argument(
        "--story", action="store_true", help="with --seed: what happened last, even if all is well"
    )
    found.add_argument("-o", "--output", choices=("text", "json"), default="text")
    return found


def problems_of(given: argparse.Namespace, faults: Sequence[str]) -> list[str]:
    """All that is wrong with the options."""
    found: list[str] = []
    if (given.seed is None) == (given.seeds is None):
        found.append("give either --seed or --seeds")
    found += [f"--faults: {name!r} is none of {', '.join(FAULTS)}" for name in faults if name not in FAULTS]
    if given.profile is not None and given.profile not in PROFILES:
        found.append(f"--profile: {given.profile!r} is none of {', '.join(sorted(PROFILES))}")
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
    faults = tuple(name for name in FAULTS if name in faults)
    options = Options(given.seed or 0, faults, given.profile, given.jobs, given.nodes, given.storm)
    if given.seed is not None:
        return _one(guarded(options), as_json=given.output == "json", story=given.story)
    return _many(options, given.first, given.seeds, as_json=given.output == "json")


def _one(outcome: Outcome, *, as_json: bool, story: bool) -> int:
    if as_json:
        print(json.dumps({**outcome._asdict(), "happened": dict(outcome.happened)}, indent=1))
        return BROKEN if outcome.judge else SOUND
    if outcome.judge or story:
        print("\n".join(outcome.story))
    print(
        f"seed {outcome.seed}, {outcome.profile}: {outcome.records} records ({outcome.void} void) in "
        f"{outcome.terms} terms, {outcome.jobs} jobs ended in {outcome.virtual_s:.0f} s; "
        f"ledger {outcome.ledger_hash}"
    )
    if outcome.judge:
        print(f"BROKEN  {outcome.judge}: {outcome.what}")
        return BROKEN
    print("sound")
    return SOUND


def _many(options: Options, first: int, seeds: int, *, as_json: bool) -> int:
    lives = [options._replace(seed=seed) for seed in range(first, first + seeds)]
    began_s = time.perf_counter()
    console = Console(stderr=True)
    columns = (
        TextColumn("lives"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[broken]} broken"),
        TimeRemainingColumn(),
    )
    broken = 0
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("lives", total=seeds, broken=0)

        def told(outcome: Outcome) -> None:
            nonlocal broken
            broken += bool(outcome.judge)
            progress.update(task, advance=1, broken=broken)

        summary = gather(live_all(lives, cores()), told, options)
    seconds = time.perf_counter() - began_s
    if as_json:
        print(json.dumps({**summary._asdict(), "seconds": round(seconds, 1)}, indent=1))
    else:
        _table(summary, seconds)
    if summary.lives < seeds:
        return INTERRUPTED
    return BROKEN if summary.failures else SOUND


def _table(summary: Summary, seconds: float) -> None:
    console = Console()
    table = Table("what", "count", title=f"{summary.lives} lives in {seconds:.1f} s")
    for name, value in (
        ("jobs ended", summary.jobs),
        ("records", summary.records),
        ("void records", summary.void),
        ("terms", summary.terms),
        ("virtual hours", round(summary.virtual_s / 3_600)),
        *summary.happened.items(),
        *((f"lives under {name}", count) for name, count in summary.profiles.items()),
        ("broken", len(summary.failures)),
    ):
        table.add_row(name, f"{value:,}")
    console.print(table)
    for failure in summary.failures:
        print(f"BROKEN  {failure['judge']}: {failure['what']}\n        {failure['command']}")
