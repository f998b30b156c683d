"""`penstock compare`: one trace under several profiles and seeds; means, intervals, differences."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from penstock.commandline import takes
from penstock.exits import BadCommand, Exit
from penstock.scheduling.profiles import names as profile_names
from penstock.screen import Bar, bar, console, write_json
from penstock.simulator import comparison
from penstock.simulator.assumptions import Asked, Variant, variants_of
from penstock.simulator.commands.options import (
    Given,
    SimulationOptions,
    bad_input_stops,
    begin,
)
from penstock.simulator.commands.output import (
    comparison_keys,
    print_assumptions,
    print_comparison,
    print_stopped,
    stdout,
    stopped_runs,
)
from penstock.simulator.commands.reporting import ReportOptions, background
from penstock.simulator.comparison import Standing, deterministic
from penstock.simulator.parallel import Look, Outcome, Task, run_all
from penstock.simulator.report.build import report_of
from penstock.simulator.results.metrics import duration
from penstock.simulator.runs import OnProgress, Recorder, Result, perform

MAX_SEEDS = 1_000
MAX_JOBS = 256


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SimulationOptions, ReportOptions):
    """Options of `penstock compare`."""

    profiles: Annotated[
        str,
        typer.Option(
            metavar="A,B,…",
            help=f"Profiles to compare, with differences to the first: {', '.join(profile_names())}.",
        ),
    ]
    seeds: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Runs per profile, with seeds SEED … SEED+N-1; only one where the run is deterministic.",
        ),
    ] = 10
    durations: Annotated[
        Asked,
        typer.Option(
            help="Run times that policies read: known, the trace's own; learned, by the estimator from the "
            "runs that "
            "have ended; unknown, none; both: policies that read run times are simulated twice, with learned "
            "and with known ones."
        ),
    ] = "both"
    jobs: Annotated[
        int, typer.Option(metavar="N", help="Number of parallel runs; by default the number of cores.")
    ] = _cores()


@takes(CompareOptions)
@bad_input_stops()
def compare(ctx: typer.Context, asked: CompareOptions) -> int:
    """Simulate a trace under several profiles and seeds; report means with confidence intervals.

    Exit codes: 0 done; 1 a run failed; 2 bad command line or trace; 130 stopped by Ctrl-C
    or SIGTERM, with the finished runs and the figures so far of those in progress.
    """
    errors = console(stderr=True, soft_wrap=True)
    profiles = _profiles(asked)
    asked.check_files()
    given, trace = begin(asked, profiles, errors)
    seeded = given.seeded(trace)
    variants = variants_of(profiles, asked.durations, endless=given.fills(trace))
    assumed = given.assumptions(variants, trace)
    outcome = _run_all(asked, given, variants, seeded, errors)
    for failed in sorted(outcome.failed):
        errors.print(f"penstock: {failed.task}: {failed.why}", markup=False)
    for result in outcome.results:
        if result.problem:
            errors.print(f"penstock: {result.name} with seed {result.seed}: {result.problem}", markup=False)
    names = [one.name for one in variants]
    standings = comparison.compare(names, outcome.results, seeded=seeded)
    _show(asked, standings, outcome, trace.skipped_lines, assumed)
    if not standings:
        nothing = asked.wanted and not stopped_runs(outcome.results)
        errors.print("penstock: no run was finished" + ("; no report" if nothing else ""))
    if asked.wanted and (standings or stopped_runs(outcome.results)):
        seeds = f"{asked.seed} … {asked.seed + asked.seeds - 1}" if asked.seeds > 1 else f"{asked.seed}"
        about = background(ctx.find_root().obj.line, given, trace, assumed, [("Seeds", seeds)])
        shown_here = [one for one in outcome.results if one.whole] or stopped_runs(outcome.results)[:1]
        page = report_of(about, standings, shown_here, _warning(names, standings, outcome))
        asked.write_files(page, errors)
    if outcome.interrupted:
        return Exit.INTERRUPTED
    return Exit.PROBLEM if outcome.failed or any(result.problem for result in outcome.results) else Exit.OK


def _profiles(asked: CompareOptions) -> Sequence[str]:
    """The profiles to compare. Raises `BadCommand`; unknown names are found by `begin`."""
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


def _run_all(
    asked: CompareOptions, given: Given, variants: Sequence[Variant], seeded: bool, errors: Console
) -> Outcome:
    """Runs all variants, the first seed of each first; the other seeds if they are known, or then found, to
    matter."""
    first, rest = asked.seed, range(asked.seed + 1, asked.seed + asked.seeds)

    def do(task: Task, report: OnProgress) -> Result:
        trace = given.trace(task.seed)
        recorder = Recorder(draws=task.draws)
        simulation = given.simulation(task.profile, task.seed, trace, recorder.take, task.durations)
        return perform(simulation, recorder, report, endless=given.fills(trace), name=task.name)

    def then(result: Result) -> Sequence[Task]:
        if seeded or result.seed != first or not result.whole or deterministic(result, seeded=False):
            return ()
        return [Task(result.profile, seed, False, result.durations, result.name) for seed in rest]

    def task(one: Variant, seed: int, *, draws: bool) -> Task:
        return Task(one.profile, seed, draws, one.durations, one.name)

    tasks = [task(one, first, draws=asked.wanted) for one in variants]
    if seeded:
        tasks += [task(one, seed, draws=False) for seed in rest for one in variants]
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


def _show(
    asked: CompareOptions,
    standings: Sequence[Standing],
    outcome: Outcome,
    skipped: int,
    assumed: Mapping[str, str],
) -> None:
    if asked.output == "json":
        write_json(comparison_keys(standings, outcome.results, skipped, outcome.interrupted, assumed))
        return
    if standings:
        print_comparison(standings, stdout())
    print_stopped(outcome.results, stdout())
    print_assumptions(assumed, stdout())


def _warning(names: Sequence[str], standings: Sequence[Standing], outcome: Outcome) -> str:
    finished = sum(len(standing.results) for standing in standings)
    seen = {one.name for one in standings} | {one.name for one in stopped_runs(outcome.results)}
    missing = [name for name in names if name not in seen]
    without = f" Nothing is known of {', '.join(missing)}." if missing else ""
    if outcome.interrupted:
        return f"Stopped before its end: {finished} runs were finished.{_so_far(outcome, finished)}{without}"
    if outcome.failed or missing:
        return (
            f"{len(outcome.failed) or len(missing)} runs broke off; only the {finished} whole ones are "
            f"shown.{without}"
        )
    return ""


def _so_far(outcome: Outcome, finished: int) -> str:
    """Sentences about the runs in progress."""
    stopped = [
        f"{one.name} with seed {one.seed} had done {one.figures.finished_jobs:,} of {one.jobs:,} jobs, "
        f"on average {duration(one.figures.avg_jct_s)} after their submission"
        for one in stopped_runs(outcome.results)
    ]
    if not stopped:
        return " Only they are shown." if finished else ""
    shown_here = (
        "Only they are in figures and charts" if finished else "Figures and charts are of the first of these"
    )
    return f" In progress: {'; '.join(stopped)}. {shown_here}."
