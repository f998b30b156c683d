"""`penstock simulate`: one trace under one profile; figures on stdout, progress on stderr."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
from pydantic import ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from penstock.events.codec import describe
from penstock.events.facts import PlacerSettings
from penstock.policies.profiles import PROFILES, UnknownProfile, policy_for
from penstock.simulator.cluster import BadCluster, nodes_of
from penstock.simulator.engine import Options, Simulation, Unsound
from penstock.simulator.meter import Figures
from penstock.simulator.nodes import Latency
from penstock.simulator.placement_table import NotMeasured
from penstock.simulator.reading import MAX_SHOWN, BadTrace
from penstock.simulator.traces import SETS, Trace, locate, read_trace
from penstock.simulator.truths import TRUTHS, Run, UnknownTruth, work_for

OK, PROBLEM, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
STEPS_PER_UPDATE = 256  # of the progress bar


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    sets = ", ".join(f"{name}/…" for name in SETS)
    top = argparse.ArgumentParser(
        prog="penstock", description="The same decisions as on a real cluster, in virtual time."
    )
    simulate = top.add_subparsers(dest="command", required=True).add_parser(
        "simulate", help="run a trace under a profile and tell how it did"
    )
    simulate.add_argument("trace", help=f"a CSV file, or <data set>/<name>: {sets}")
    simulate.add_argument("--profile", default="fifo", help=f"one of {', '.join(PROFILES)}")
    simulate.add_argument("--cluster", default="8x8", help="<nodes>x<GPUs per node>, as 8x8 or 4x8+2x4")
    simulate.add_argument("--truth", default="constant", help=f"how fast jobs run: {', '.join(TRUTHS)}")
    simulate.add_argument("--seed", type=int, default=0, help="of all chance")
    simulate.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a placer setting; VALUE is JSON"
    )
    simulate.add_argument("--unknown-durations", action="store_true", help="estimates carry no run time")
    simulate.add_argument("--start-latency", type=float, default=0.0, metavar="S", help="of each task")
    simulate.add_argument("--stop-latency", type=float, default=0.0, metavar="S", help="after SIGTERM")
    simulate.add_argument(
        "--single-gpu-workers", action="store_true", help="a worker per GPU, free to spread over nodes"
    )
    simulate.add_argument(
        "--ticks",
        type=float,
        default=0.0,
        metavar="S",
        help="the placer hears of things only every S seconds",
    )
    simulate.add_argument("--skip-bad", action="store_true", help="leave out bad lines, and count them")
    simulate.add_argument("--ledger", type=Path, metavar="FILE", help="write the ledger, one record a line")
    simulate.add_argument("--check", action="store_true", help="check all invariants after every record")
    simulate.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return top


@dataclass(frozen=True, slots=True)
class Given:
    """The command line, judged."""

    trace: Trace
    simulation: Callable[[Callable[[bytes], object] | None], Simulation]


class BadCommand(ValueError):
    """The command line asks for something that does not exist; the message says what does."""


def judge(asked: argparse.Namespace) -> Given:
    """Raises `BadCommand`, `BadCluster`, `BadTrace`, `UnknownProfile`, `UnknownTruth`."""
    nodes = nodes_of(asked.cluster)
    settings = _settings(asked)
    policy_for(settings)
    for name in ("start_latency", "stop_latency", "ticks"):
        if not 0 <= getattr(asked, name) <= 86_400:
            raise BadCommand(f"--{name.replace('_', '-')}: between 0 and 86,400 seconds")
    path = locate(asked.trace)
    trace = read_trace(path, most_gpus=sum(len(node.gpus) for node in nodes), skip_bad=asked.skip_bad)
    options = Options(
        latency=Latency(asked.start_latency, asked.stop_latency),
        durations_known=not asked.unknown_durations,
        single_gpu_workers=asked.single_gpu_workers,
        tick_s=asked.ticks,
        check_every_step=asked.check,
    )
    run = Run(max(len(node.gpus) for node in nodes), asked.ticks)
    work = work_for(asked.truth, trace, path, settings, run)

    def make(sink: Callable[[bytes], object] | None) -> Simulation:
        return Simulation(nodes, settings, work, trace.jobs, options, sink)

    return Given(trace, make)


def _settings(asked: argparse.Namespace) -> PlacerSettings:
    values: dict[str, object] = {"profile": asked.profile, "seed": asked.seed}
    for pair in asked.set:
        name, equals, text = pair.partition("=")
        if not equals or name in values or name not in PlacerSettings.model_fields:
            known = ", ".join(field for field in PlacerSettings.model_fields if field not in values)
            raise BadCommand(f"--set {pair}: NAME=VALUE with NAME once, and one of {known}")
        try:
            values[name] = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise BadCommand(f"--set {pair}: the value is no JSON: {error}") from error
    try:
        return PlacerSettings.model_validate(values)
    except ValidationError as error:
        raise BadCommand(f"settings: {describe(error)}") from error


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 an invariant broke, 2 bad command or trace, 130 stopped (with the partial figures)."""
    asked = parser().parse_args(arguments)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        given = judge(asked)
    except (BadCommand, BadCluster, BadTrace, UnknownProfile, UnknownTruth) as error:
        for line in str(error.args[0]).splitlines():
            errors.print(f"penstock: {line}", markup=False)
        return BAD_INPUT
    for problem in given.trace.skipped[:MAX_SHOWN]:
        errors.print(f"penstock: skipped {problem}", markup=False)
    if given.trace.skipped:
        errors.print(f"penstock: {len(given.trace.skipped)} problems; the lines with them are left out")
    with ExitStack() as stack:
        sink = None
        if asked.ledger is not None:
            try:
                file = stack.enter_context(asked.ledger.open("wb"))
            except OSError as error:
                errors.print(f"penstock: {asked.ledger}: {error.strerror}", markup=False)
                return BAD_INPUT

            def sink(value: bytes) -> object:
                return file.write(value + b"\n")

        figures, code = run(given.simulation(sink), errors)
    show(figures, len(given.trace.skipped), asked.output)
    return code


def run(simulation: Simulation, errors: Console) -> tuple[Figures, int]:
    """Runs to the end or to Ctrl-C."""
    code = OK
    wall, busy = time.perf_counter(), time.process_time()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("jobs, {task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("simulating", total=simulation.jobs, rate="")
        steps = 0
        try:
            while simulation.step():
                steps += 1
                if steps % STEPS_PER_UPDATE == 0:
                    rate = simulation.meter.events / max(1e-9, time.perf_counter() - wall)
                    bar.update(task, completed=simulation.meter.finished, rate=f"{rate:,.0f} events/s")
        except KeyboardInterrupt:
            code = INTERRUPTED
        except (Unsound, NotMeasured) as error:
            errors.print(f"penstock: {error}", markup=False)
            code = PROBLEM
    return simulation.figures(time.perf_counter() - wall, time.process_time() - busy), code


def show(figures: Figures, skipped: int, output: str) -> None:
    """On stdout."""
    found = {**figures._asdict(), "skipped_lines": skipped}
    if output == "json":
        sys.stdout.buffer.write(orjson.dumps(found, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
        return
    table = Table("figure", "value", box=None, pad_edge=False)
    for name, value in found.items():
        table.add_row(
            name,
            f"{value:,.4f}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int)
            else value,
        )
    Console(highlight=False, soft_wrap=True).print(table)
