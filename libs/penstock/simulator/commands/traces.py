"""`penstock traces ls|describe|convert`: which traces there are, what they are like, and as our own CSV."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.exits import BadCommand, Exit
from penstock.runtime.csv_import import BadFile, Problem, header_of, text_of
from penstock.screen import PIPED_WIDTH, console, plain_table, write_json
from penstock.simulator.commands.options import (
    Output,
    Seed,
    SkipBad,
    TraceName,
    bad_input_stops,
    report_skipped,
)
from penstock.simulator.generators.base import Generator
from penstock.simulator.generators.registry import GENERATORS, generate, generator_of, of_summaries
from penstock.simulator.traces import description
from penstock.simulator.traces.cluster import NODE_SETS, cluster_of, gpu_count, read_nodes
from penstock.simulator.traces.description import Description, Load, load_on
from penstock.simulator.traces.fitting import ClusterCapacity
from penstock.simulator.traces.importing import (
    DATA_VARIABLE,
    DEFAULT_DATA,
    SETS,
    SUMMARIES,
    Trace,
    data_root,
    locate,
    names_in,
    read_trace,
)
from penstock.simulator.traces.writing import trace_lines, write_lines

OUR_COLUMNS = (
    "Columns: job_id; submit_s, from the trace's start; duration_s, alone on what it asked for, empty where it is not "
    "given; gpus, of all its workers. Further ones, written where some job has a value: model; batch_size; owner; "
    "iterations; cores and host_memory_mib, of all its workers, cores also in parts; gpu_memory_mib, on each GPU; "
    "gpu_share_milli, thousandths of its only GPU; gpu_models, those allowed, separated by |; workers; "
    "parameter_servers; server_gpus, of each of those; patience_s, after which it leaves if it still waits; inference, "
    "yes or no; memory_bandwidth, of a node's, 0 to 1; labels, as name=value|name=value."
)
MAX_NAMED = 8  # models and owners in the table; JSON has all
BAR_CHARS = 24
DAY_S, HOUR_S, MINUTE_S = 86_400, 3_600, 60
NAME_CHARS = 48  # of a trace, on a screen; the start of a name is enough to name it


# --------------------------------------------------------------------------------------------------- ls


class Listed(NamedTuple):
    """A trace of a data set; without `found` it cannot be read, and `problem` is the reason."""

    name: str
    format: str
    found: Description | None
    problem: str = ""


@bad_input_stops()
def ls(ctx: typer.Context, output: Output = "table") -> int:
    """List all traces that are here."""
    root = data_root()
    listed = list(_listed(root)) if root is not None else []
    if output == "json":
        write_json(_ls_keys(root, listed))
    else:
        _show_ls(console(), root, listed)
    return Exit.PROBLEM if any(one.found is None for one in listed) else Exit.OK


def _listed(root: Path) -> Iterator[Listed]:
    for data_set in SETS:
        for name in names_in(root, data_set):
            whole = f"{data_set}/{name}"
            try:
                trace = read_trace(locate(whole))
            except BadFile as error:
                yield Listed(whole, "", None, str(error.problems[0]))
            else:
                yield Listed(whole, trace.format, description.describe(trace.jobs))


def _ls_keys(root: Path | None, listed: Sequence[Listed]) -> Mapping[str, object]:
    return {
        "data": None if root is None else str(root.resolve()),
        "data_from": _data_from(),
        "traces": [
            {
                "trace": one.name,
                "format": one.format or None,
                "problem": one.problem or None,
                "jobs": one.found.jobs if one.found else None,
                "largest_gpus": one.found.largest_gpus if one.found else None,
                "span_s": one.found.span_s if one.found else None,
                "gpu_hours": one.found.gpu_hours if one.found else None,
            }
            for one in listed
        ],
        "generators": {name: generator.text for name, generator in _generators().items()},
        "clusters": [name for name in NODE_SETS if root is not None and (root / NODE_SETS[name]).is_file()],
        "summaries": [
            name for name, file in SUMMARIES.items() if root is not None and (root / file).is_file()
        ],
    }


def _generators() -> Mapping[str, Generator]:
    return {**of_summaries(), **GENERATORS}


def _data_from() -> str:
    message = os.environ.get(DATA_VARIABLE)
    return f"{DATA_VARIABLE}={message}" if message else f"{DEFAULT_DATA}, for {DATA_VARIABLE} is not set"


def _show_ls(screen: Console, root: Path | None, listed: Sequence[Listed]) -> None:
    if root is None:
        screen.print(f"No data sets: there is no folder {_data_from()}", markup=False)
    else:
        table = plain_table()
        most = NAME_CHARS if screen.width < PIPED_WIDTH else None
        table.add_column("trace", no_wrap=True, overflow="ellipsis", max_width=most)
        table.add_column("format", no_wrap=True)
        for column in ("jobs", "GPUs", "arrive over", "GPU hours"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in listed:
            if one.found is None:
                table.add_row(one.name, f"[red]{escape(one.problem)}[/]")
                continue
            hours = f"{one.found.gpu_hours:,.0f}" if one.found.run_s else "–"
            table.add_row(
                one.name, one.format, f"{one.found.jobs:,}", f"≤ {one.found.largest_gpus}",
                span(one.found.span_s), hours,
            )  # fmt: skip
        screen.print(table)
        screen.print(f"\n{len(listed)} traces in {root.resolve()} ({_data_from()})", markup=False)
        for name, file in SUMMARIES.items():
            if (root / file).is_file():
                screen.print(
                    f"{name}: only sums over clusters; `penstock traces describe {name}`", markup=False
                )
        for name, file in NODE_SETS.items():
            if (root / file).is_file():
                cluster = read_nodes(root / file)
                message = (
                    f"{len(cluster.nodes):,} nodes, {gpu_count(cluster.nodes):,} GPUs; `--cluster {name}`"
                )
                screen.print(f"{name}: {message}", markup=False)
    for name, generator in _generators().items():
        screen.print(f"{name}: generated; {generator.text}", markup=False)


# --------------------------------------------------------------------------------------------- describe


def _open(name: str, seed: int, *, skip_bad: bool) -> Trace:
    """Raises `BadFile`. Reports on stderr what was left out."""
    generator = None if Path(name).exists() else generator_of(name)
    if generator is not None:
        return generate(name, generator, seed)
    trace = read_trace(locate(name), skip_bad=skip_bad)
    report_skipped(trace, console(stderr=True, soft_wrap=True))
    return trace


@bad_input_stops()
def describe(
    ctx: typer.Context,
    trace: TraceName,
    cluster: Annotated[
        str | None, typer.Option(help="Also its load on this cluster, as for `penstock simulate`.")
    ] = None,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    output: Output = "table",
) -> None:
    """Describe a trace: sizes, run times, models, owners, GPU hours, load on a cluster.

    Of a data set that holds no jobs: its sums.
    """
    if trace in SUMMARIES and not Path(trace).exists():
        _summarise(trace, output)
        return
    opened = _open(trace, seed, skip_bad=skip_bad)
    found, load = description.describe(opened.jobs), None
    if cluster is not None:
        nodes = cluster_of(cluster)
        capacity = ClusterCapacity(nodes.nodes, nodes.slices_per_core)
        misfits = sum(1 for job in opened.jobs if any(True for _ in capacity.problems(job)))
        load = load_on(gpu_count(nodes.nodes), misfits, found)
    if output == "json":
        keys: dict[str, object] = {"trace": trace, "format": opened.format}
        keys |= found._asdict()
        keys["run_s"] = found.run_s._asdict() if found.run_s else None
        keys["sizes"] = [size._asdict() for size in found.sizes]
        keys["left_out"] = list(opened.left_out)
        keys["skipped_lines"] = opened.skipped_lines
        keys["load"] = None if load is None else {"cluster": cluster, **load._asdict()}
        write_json(keys)
        return
    screen = console()
    screen.print(_overview(f"{trace} (format {opened.format})", opened, found, cluster, load))
    screen.print()
    screen.print(_sizes(found))


def _overview(title: str, trace: Trace, found: Description, cluster: str | None, load: Load | None) -> Table:
    facts = plain_table()
    facts.show_header = False
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    facts.add_row("trace", escape(title))
    facts.add_row("jobs", f"{found.jobs:,}")
    facts.add_row("arrive over", f"{span(found.span_s)}, from {span(found.first_s)} on")
    if found.run_s is not None:
        unknown = f"; {found.unknown_run_times:,} jobs without run time" if found.unknown_run_times else ""
        facts.add_row("GPU hours", f"{found.gpu_hours:,.1f}{unknown}")
        times = "  ".join(f"[dim]{name}[/] {span(value)}" for name, value in found.run_s.percentiles.items())
        facts.add_row("run time", f"mean {span(found.run_s.mean)}, most {span(found.run_s.most)}")
        facts.add_row("", times)
    else:
        facts.add_row("run time", "not given: a job model that computes it from measurements is needed")
    facts.add_row("models", _names(found.models))
    facts.add_row("owners", _names(found.owners))
    if trace.left_out:
        facts.add_row("not read", escape(", ".join(trace.left_out)))
    if load is not None:
        work = "" if load.work is None else f"work {load.work:.1%} of its GPUs over the span; "
        misfits = f"; [red]{load.misfits:,} jobs can never run there[/]" if load.misfits else ""
        asked_for = f"{load.asked:.1%}" if load.asked < 2 else f"{load.asked:,.1f} times as many"
        message = f"{load.gpus:,} GPUs: {work}all jobs at once ask for {asked_for}{misfits}"
        facts.add_row(f"on {escape(str(cluster))}", message)
    return facts


def _sizes(found: Description) -> Table:
    table = plain_table("GPUs", "jobs", "", right=("GPUs", "jobs", ""))
    table.add_column("", no_wrap=True, min_width=BAR_CHARS)
    table.add_column("GPU hours", justify="right", no_wrap=True)
    most = max(size.jobs for size in found.sizes)
    for gpus, jobs, gpu_hours in found.sizes:
        bar = "█" * max(1, round(BAR_CHARS * jobs / most))
        hours = f"{gpu_hours:,.0f}" if found.run_s is not None else "–"
        table.add_row(gpus, f"{jobs:,}", f"{jobs / found.jobs:.1%}", f"[cyan]{bar}[/]", hours)
    return table


def _names(counts: Mapping[str, int]) -> str:
    if not counts:
        return "not given"
    named = ", ".join(f"{escape(name)} [dim]{count:,}[/]" for name, count in list(counts.items())[:MAX_NAMED])
    more = len(counts) - MAX_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def span(seconds: float) -> str:
    """A time for people: `45 s`, `12.5 min`, `3.2 h`, `45.1 d`."""
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.3g} s"
    if seconds < 2 * HOUR_S:
        return f"{seconds / MINUTE_S:.1f} min"
    return f"{seconds / HOUR_S:.1f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.1f} d"


def _summarise(name: str, output: str) -> None:
    """A data set's sums as they are: one column per cluster. Raises `BadFile`."""
    root = data_root()
    if root is None:
        raise BadFile(
            name, [Problem(0, "", f"the data sets are not here; set {DATA_VARIABLE} to their folder")]
        )
    path = root / SUMMARIES[name]
    text = text_of(path)
    columns = header_of(path, text)
    lines = [line.split(",") for line in text.split("\n")[1:] if line.strip()]
    clusters = [dict(zip(columns, line, strict=False)) for line in lines]
    if output == "json":
        write_json({"trace": name, "format": "summary", "clusters": clusters})
        return
    heads = [escape(cluster[columns[0]]) for cluster in clusters]
    table = plain_table("", *heads, right=heads)
    table.columns[0].style = "bold"
    for column in columns[1:]:
        table.add_row(column, *(escape(cluster.get(column, "")) or "–" for cluster in clusters))
    screen = console()
    screen.print(table)
    names = [one for one in of_summaries() if one.startswith(f"{name}/")]
    sampled = f"; jobs are sampled with these sums as {', '.join(names)}" if names else ""
    screen.print(
        f"\nSums over whole clusters, times in seconds; no single job is published{sampled}.", markup=False
    )


# ---------------------------------------------------------------------------------------------- convert


@bad_input_stops()
def convert(
    ctx: typer.Context,
    trace: TraceName,
    to: Annotated[Literal["csv"], typer.Option(help="The format.")] = "csv",
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="By default stdout.")
    ] = None,
) -> None:
    opened = _open(trace, seed, skip_bad=skip_bad)
    try:
        write_lines(output, trace_lines(opened.jobs))
    except OSError as error:
        raise BadCommand(f"{output}: {error.strerror}") from error
    staged = sum(1 for job in opened.jobs if job.stages is not None)
    lost = [*opened.left_out, *([f"the stage times of {staged:,} jobs"] if staged else [])]
    left_out = f"; left out: {', '.join(lost)}" if lost else "; nothing left out"
    console(stderr=True, soft_wrap=True).print(
        f"penstock: {len(opened.jobs):,} jobs written{left_out}", markup=False
    )


convert.__doc__ = f"""Write a trace as our own CSV, and list the columns that have no place there.

{OUR_COLUMNS}
"""
