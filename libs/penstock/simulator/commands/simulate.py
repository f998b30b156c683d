"""`penstock simulate`: one trace under one profile; figures on stdout, progress on stderr."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.commandline import takes
from penstock.exits import BadCommand, Exit
from penstock.model.nouns.settings import OWN_PROFILE
from penstock.scheduling.profiles import names as profile_names
from penstock.screen import bar, console, write_json
from penstock.simulator.assumptions import Variant, variants_of
from penstock.simulator.commands.options import (
    Given,
    SimulationOptions,
    bad_input_stops,
    begin,
)
from penstock.simulator.commands.output import figures_table, print_assumptions, run_keys, stdout
from penstock.simulator.commands.reporting import ReportOptions, background
from penstock.simulator.comparison import compare
from penstock.simulator.engine import Durations
from penstock.simulator.report.build import report_of
from penstock.simulator.runs import Progress, Recorder, Result, Sink, first_interrupt_waits, perform
from penstock.simulator.traces.files.importing import Trace

REDRAW_EVERY_S = 0.1


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(SimulationOptions, ReportOptions):
    """Options of `penstock simulate`."""

    profile: Annotated[str, typer.Option(help=f"One of {', '.join(profile_names())}.")] = OWN_PROFILE
    durations: Annotated[
        Durations,
        typer.Option(
            help="Run times that policies read: learned, by the estimator from the runs that have ended; "
            "known, the "
            "trace's own, which no service knows; unknown, none."
        ),
    ] = "learned"
    ledger: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ledger, one record a line.")
    ] = None


@takes(SimulateOptions)
@bad_input_stops()
def simulate(ctx: typer.Context, asked: SimulateOptions) -> int:
    """Simulate a trace under a profile, in virtual time, and report its metrics.

    Exit codes: 0 done; 1 an invariant was violated, or the job model has no value for a placement; 2 bad
    command line or trace; 130 stopped by Ctrl-C or SIGTERM, with the figures so far.
    """
    errors = console(stderr=True, soft_wrap=True)
    asked.check_files()
    given, trace = begin(asked, [asked.profile], errors)
    variants = variants_of([asked.profile], asked.durations, endless=given.fills(trace))
    with ExitStack() as stack:
        file: Sink | None = None
        if asked.ledger is not None:
            try:
                ledger = stack.enter_context(asked.ledger.open("wb"))
            except OSError as error:
                raise BadCommand(f"--ledger {asked.ledger}: {error.strerror}") from error

            def file(value: bytes) -> object:
                return ledger.write(value + b"\n")

        result = _go(asked, given, trace, variants[0], Recorder(file, draws=asked.wanted), errors)
    if result.problem:
        errors.print(f"penstock: {result.problem}", markup=False)
    keys = run_keys(result, trace.skipped_lines)
    assumed = given.assumptions(variants, trace)
    if asked.output == "json":
        write_json({**keys, "assumptions": assumed})
    else:
        stdout().print(figures_table(keys))
        print_assumptions(assumed, stdout())
    if asked.wanted:
        standings = compare([result.name], [result], seeded=given.seeded(trace))
        about = background(ctx.find_root().obj.line, given, trace, assumed)
        page = report_of(about, standings, [result], _warning(result))
        asked.write_files(page, errors)
    return Exit.INTERRUPTED if result.interrupted else Exit.PROBLEM if result.problem else Exit.OK


def _go(
    asked: SimulateOptions, given: Given, trace: Trace, variant: Variant, recorder: Recorder, errors: Console
) -> Result:
    """Runs the simulation to its end, or to Ctrl-C or SIGTERM."""
    shown_s = 0.0
    with first_interrupt_waits() as stopped, bar(errors, "simulating") as draw:

        def report(progress: Progress) -> bool:
            nonlocal shown_s
            if progress.wall_s - shown_s >= REDRAW_EVERY_S:
                shown_s = progress.wall_s
                rate = progress.events / max(1e-9, progress.wall_s)
                draw(progress.share, f"{progress.finished:,} jobs done, {rate:,.0f} events/s,")
            return not stopped()

        simulation = given.simulation(asked.profile, asked.seed, trace, recorder.take, variant.durations)
        return perform(simulation, recorder, report, endless=given.fills(trace))


def _warning(result: Result) -> str:
    if result.problem:
        return f"The run broke off: {result.problem}. What is shown is what came before."
    if result.interrupted:
        return (
            f"Stopped before its end: {result.figures.finished_jobs:,} of {result.jobs:,} jobs were done. "
            "Figures and charts are of what had happened until then."
        )
    return ""
