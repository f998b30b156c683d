"""`penstock compare`: one trace under several profiles and seeds; means, intervals, differences."""

import argparse
import os
import re
import time
from collections.abc import Sequence

from rich.console import Console

from penstock.policies.profiles import PROFILES
from penstock.simulator.commands import reporting
from penstock.simulator.commands.exits import INTERRUPTED, OK, PROBLEM, BadCommand
from penstock.simulator.commands.options import Given, add_simulation_options, judge, tell_skipped
from penstock.simulator.commands.output import (
    comparison_keys,
    print_comparison,
    stdout,
    write_json,
)
from penstock.simulator.commands.progress import Bar, bar
from penstock.simulator.comparison import Standing, compare, without_chance
from penstock.simulator.runs import Recorder, Result, Tell, perform
from penstock.simulator.workers import Look, Outcome, Task, run_all

MAX_SEEDS = 1_000
MAX_JOBS = 256


def add_arguments(to: argparse.ArgumentParser) -> None:
    add_simulation_options(to)
    to.add_argument(
        "--profiles",
        required=True,
        metavar="A,B,…",
        help=f"differences are to the first: {', '.join(PROFILES)}",
    )
    to.add_argument(
        "--seeds",
        type=int,
        default=10,
        metavar="N",
        help="runs per profile, with seeds SEED … SEED+N−1; one is enough, and all there is, where nothing is left "
        "to chance (default 10)",
    )
    to.add_argument(
        "--jobs",
        type=int,
        default=_cores(),
        metavar="N",
        help="runs at once (default: the cores, %(default)s)",
    )
    reporting.add_report_options(to)


def run(asked: argparse.Namespace, errors: Console) -> int:
    """Raises what `judge` raises."""
    profiles = _profiles(asked)
    given = judge(asked)
    for profile in profiles:
        given.settings(profile, asked.seed)
    reporting.judge_report(asked)
    trace = given.trace(asked.seed)
    given.simulation(profiles[0], asked.seed, trace)
    tell_skipped(trace, errors)
    seeded = given.seeded(trace)
    outcome = _run_all(given, profiles, seeded, errors)
    for failed in sorted(outcome.failed):
        errors.print(f"penstock: {failed.task}: {failed.why}", markup=False)
    for result in outcome.results:
        if result.problem:
            errors.print(
                f"penstock: {result.profile} with seed {result.seed}: {result.problem}", markup=False
            )
    standings = compare(profiles, outcome.results, seeded=seeded)
    _show(asked, standings, outcome, trace.skipped_lines)
    if not standings:
        errors.print("penstock: no run was finished" + ("; no report" if reporting.wanted(asked) else ""))
    elif reporting.wanted(asked):
        seeds = f"{asked.seed} … {asked.seed + asked.seeds - 1}" if asked.seeds > 1 else f"{asked.seed}"
        about = reporting.background(given, trace, [("Seeds", seeds)])
        reporting.write(
            asked, about, standings, outcome.results, _warning(profiles, standings, outcome), errors
        )
    if outcome.interrupted:
        return INTERRUPTED
    return PROBLEM if outcome.failed or any(result.problem for result in outcome.results) else OK


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _profiles(asked: argparse.Namespace) -> Sequence[str]:
    """Raises `BadCommand`; names that exist not are `judge`'s."""
    profiles = [name for name in re.split(r"[,\s]+", asked.profiles) if name]
    if not profiles:
        raise BadCommand("--profiles: name at least one")
    twice = sorted({name for name in profiles if profiles.count(name) > 1})
    if twice:
        raise BadCommand(f"--profiles: {', '.join(twice)} twice")
    for option, most in (("seeds", MAX_SEEDS), ("jobs", MAX_JOBS)):
        if not 1 <= getattr(asked, option) <= most:
            raise BadCommand(f"--{option}: between 1 and {most:,}")
    return profiles


def _run_all(given: Given, profiles: Sequence[str], seeded: bool, errors: Console) -> Outcome:
    """The first seed of each profile first; the others where they are known or then found to matter."""
    asked = given.asked
    first, rest = asked.seed, range(asked.seed + 1, asked.seed + asked.seeds)

    def do(task: Task, tell: Tell) -> Result:
        trace = given.trace(task.seed)
        recorder = Recorder(draws=task.draws)
        simulation = given.simulation(task.profile, task.seed, trace, recorder.take)
        return perform(simulation, recorder, tell, endless=given.fills(trace))

    def then(result: Result) -> Sequence[Task]:
        if seeded or result.seed != first or not result.whole or without_chance(result, seeded=False):
            return ()
        return [Task(result.profile, seed, False) for seed in rest]

    tasks = [Task(profile, first, reporting.wanted(asked)) for profile in profiles]
    if seeded:
        tasks += [Task(profile, seed, False) for seed in rest for profile in profiles]
    with bar(errors, "comparing") as draw:
        began_s = time.perf_counter()
        return run_all(
            tasks, do, asked.jobs, then, lambda look: _draw(draw, look, time.perf_counter() - began_s)
        )


def _draw(draw: Bar, look: Look, wall_s: float) -> None:
    shares = sum(progress.share for progress in look.running.values() if progress is not None)
    known = look.done + len(look.running) + look.waiting
    rate = look.events / max(1e-9, wall_s)
    draw((look.done + shares) / max(1, known), f"{look.done} of {known} runs, {rate:,.0f} events/s,")


def _show(asked: argparse.Namespace, standings: Sequence[Standing], outcome: Outcome, skipped: int) -> None:
    if asked.output == "json":
        write_json(comparison_keys(standings, skipped, outcome.interrupted))
    elif standings:
        print_comparison(standings, stdout())


def _warning(profiles: Sequence[str], standings: Sequence[Standing], outcome: Outcome) -> str:
    finished = sum(len(standing.results) for standing in standings)
    missing = [profile for profile in profiles if profile not in {standing.profile for standing in standings}]
    without = f" Nothing is known of {', '.join(missing)}." if missing else ""
    if outcome.interrupted:
        return f"Stopped by Ctrl-C: {finished} runs were finished, and only they are shown.{without}"
    if outcome.failed or missing:
        return f"{len(outcome.failed) or len(missing)} runs broke off; only the {finished} whole ones are shown.{without}"
    return ""
