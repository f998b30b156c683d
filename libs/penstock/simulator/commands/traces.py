"""`penstock traces ls|describe|convert`: lists traces, describes one in figures, and converts it to our own
CSV."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.exits import BadCommand, Exit
from penstock.runtime.files.csv_import import BadFile, header_of, text_of
from penstock.screen import PIPED_WIDTH, console, plain_table, write_json
from penstock.simulator.commands.options import (
    Columns,
    Output,
    Seed,
    SkipBad,
    TraceName,
    bad_input_stops,
    renames_of,
    report_skipped,
)
from penstock.simulator.generators.registry import generate, generator_of, generators, of_summaries
from penstock.simulator.results.metrics import duration
from penstock.simulator.traces import description
from penstock.simulator.traces.cluster import NODE_SETS, cluster_of, gpu_count
from penstock.simulator.traces.description import Description, Load, load_on
from penstock.simulator.traces.files.importing import (
    DATA_VARIABLE,
    DEFAULT_DATA,
    SETS,
    SUMMARIES,
    Trace,
    data_path,
    data_root,
    locate,
    names_in,
    read_trace,
)
from penstock.simulator.traces.files.writing import trace_lines, write_lines
from penstock.simulator.traces.fitting import ClusterCapacity
from penstock.text.counting import count

OUR_COLUMNS = (
    "Columns: job_id; submit_s, from the trace's start; duration_s, alone on the requested resources, empty "
    "where it is not given; gpus, of all its workers. Further columns are written where some job has a "
    "value. Names: model, batch_size, owner, iterations, workers, parameter_servers. Resources: cores "
    "(also in parts) and host_memory_mib of all its workers; gpu_memory_mib of each GPU; gpu_share_milli, "
    "thousandths of its only GPU; server_gpus of each parameter server; memory_bandwidth, share of a "
    "node's, 0 to 1; gpu_models, allowed models with | between. Behaviour: min_workers of a job that may "
    "start with fewer workers (batch_size is then that of all workers together); patience_s, the maximum "
    "wait of a job; inference, yes or no; labels, as name=value|name=value."
)
MAX_NAMED = 8  # models and owners in the table; JSON has all
BAR_CHARS = 24
NAME_CHARS = 48  # of a trace, on a screen; a unique prefix is enough to name it


# --------------------------------------------------------------------------------------------------- ls


@bad_input_stops()
def ls(ctx: typer.Context, output: Output = "table") -> int:
    """List all available traces."""
    root = data_root()
    listed = [
        _described(f"{data_set}/{name}")
        for data_set in (SETS if root is not None else ())
        for name in names_in(root or Path(), data_set)
    ]
    found = {
        "data": None if root is None else str(root.resolve()),
        "data_from": _data_from(),
        "traces": listed,
        "generators": {
            name: generator.text for name, generator in {**of_summaries(), **generators()}.items()
        },
        "clusters": [
            name for name, file in NODE_SETS.items() if root is not None and (root / file).is_file()
        ],
        "summaries": [
            name for name, file in SUMMARIES.items() if root is not None and (root / file).is_file()
        ],
    }
    if output == "json":
        write_json(found)
    else:
        _show_ls(console(), root, found)
    return Exit.PROBLEM if any(one["problem"] for one in listed) else Exit.OK


def _described(name: str) -> Mapping[str, Any]:
    """A trace of a data set in figures; without figures if it cannot be read."""
    figures = ("jobs", "largest_gpus", "span_s", "gpu_hours")
    try:
        trace = read_trace(locate(name))
    except BadFile as error:
        return {"trace": name, "format": None, "problem": str(error.problems[0]), **dict.fromkeys(figures)}
    found = description.describe(trace.jobs)
    return {
        "trace": name,
        "format": trace.format,
        "problem": None,
        **{figure: getattr(found, figure) for figure in figures},
    }


def _data_from() -> str:
    message = os.environ.get(DATA_VARIABLE)
    return f"{DATA_VARIABLE}={message}" if message else f"{DEFAULT_DATA}, for {DATA_VARIABLE} is not set"


def _show_ls(screen: Console, root: Path | None, found: Mapping[str, Any]) -> None:
    if root is None:
        screen.print(f"No data sets: there is no folder {_data_from()}", markup=False)
    else:
        table = plain_table()
        max_chars = NAME_CHARS if screen.width < PIPED_WIDTH else None
        table.add_column("trace", no_wrap=True, overflow="ellipsis", max_width=max_chars)
        table.add_column("format", no_wrap=True)
        for column in ("jobs", "GPUs", "arrive over", "GPU hours"):
            table.add_column(column, justify="right", no_wrap=True)
        for one in found["traces"]:
            if one["problem"]:
                table.add_row(one["trace"], f"[red]{escape(one['problem'])}[/]")
                continue
            hours = f"{one['gpu_hours']:,.0f}" if one["gpu_hours"] else "–"
            gpus, span = f"≤ {one['largest_gpus']}", duration(one["span_s"])
            table.add_row(one["trace"], one["format"], f"{one['jobs']:,}", gpus, span, hours)
        screen.print(table)
        screen.print(f"\n{len(found['traces'])} traces in {root.resolve()} ({_data_from()})", markup=False)
    for name in found["summaries"]:
        screen.print(f"{name}: only sums over clusters; `penstock traces describe {name}`", markup=False)
    for name in found["clusters"]:
        nodes = cluster_of(name).nodes
        message = f"{count(len(nodes), 'node')}, {count(gpu_count(nodes), 'GPU')}; `--cluster {name}`"
        screen.print(f"{name}: {message}", markup=False)
    for name, text in found["generators"].items():
        screen.print(f"{name}: generated; {text}", markup=False)


# --------------------------------------------------------------------------------------------- describe


def _open(name: str, seed: int, columns: str | None, *, skip_bad: bool) -> Trace:
    """Reads a trace. Raises `BadFile`. Reports on stderr what was left out."""
    generator = None if Path(name).exists() else generator_of(name)
    if generator is not None:
        return generate(name, generator, seed)
    trace = read_trace(locate(name), columns=renames_of(columns), skip_bad=skip_bad)
    report_skipped(trace, console(stderr=True, soft_wrap=True))
    return trace


@bad_input_stops()
def describe(
    ctx: typer.Context,
    trace: TraceName,
    cluster: Annotated[
        str | None,
        typer.Option(help="Also compute its load on this cluster, given as for `penstock simulate`."),
    ] = None,
    seed: Seed = 0,
    columns: Columns = None,
    skip_bad: SkipBad = False,
    output: Output = "table",
) -> None:
    """Describe a trace: sizes, run times, models, owners, GPU hours, load on a cluster.

    For a data set without jobs: its sums.
    """
    if trace in SUMMARIES and not Path(trace).exists():
        _summarise(trace, output)
        return
    opened = _open(trace, seed, columns, skip_bad=skip_bad)
    found, load = description.describe(opened.jobs), None
    if cluster is not None:
        nodes = cluster_of(cluster)
        capacity = ClusterCapacity(nodes.nodes, nodes.slices_per_core)
        misfits = sum(1 for job in opened.jobs if any(True for _ in capacity.problems(job)))
        load = load_on(gpu_count(nodes.nodes), misfits, found)
    if output == "json":
        write_json(
            {
                "trace": trace,
                "format": opened.format,
                **asdict(found),
                "left_out": list(opened.left_out),
                "skipped_lines": opened.skipped_lines,
                "passed_lines": dict(opened.passed),
                "load": None if load is None else {"cluster": cluster, **asdict(load)},
            }
        )
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
    facts.add_row("arrive over", f"{duration(found.span_s)}, from {duration(found.first_s)} on")
    if found.run_s is not None:
        unknown = f"; {found.unknown_run_times:,} jobs without run time" if found.unknown_run_times else ""
        facts.add_row("GPU hours", f"{found.gpu_hours:,.1f}{unknown}")
        times = "  ".join(
            f"[dim]{name}[/] {duration(value)}" for name, value in found.run_s.percentiles.items()
        )
        facts.add_row("run time", f"mean {duration(found.run_s.mean)}, most {duration(found.run_s.most)}")
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
        message = f"{count(load.gpus, 'GPU')}: {work}all jobs at once ask for {asked_for}{misfits}"
        facts.add_row(f"on {escape(str(cluster))}", message)
    return facts


def _sizes(found: Description) -> Table:
    table = plain_table("GPUs", "jobs", "", right=("GPUs", "jobs", ""))
    table.add_column("", no_wrap=True, min_width=BAR_CHARS)
    table.add_column("GPU hours", justify="right", no_wrap=True)
    largest = max(size.jobs for size in found.sizes)
    for size in found.sizes:
        bar = "█" * max(1, round(BAR_CHARS * size.jobs / largest))
        hours = f"{size.gpu_hours:,.0f}" if found.run_s is not None else "–"
        share = f"{size.jobs / found.jobs:.1%}"
        table.add_row(size.gpus, f"{size.jobs:,}", share, f"[cyan]{bar}[/]", hours)
    return table


def _names(counts: Mapping[str, int]) -> str:
    if not counts:
        return "not given"
    named = ", ".join(f"{escape(name)} [dim]{count:,}[/]" for name, count in list(counts.items())[:MAX_NAMED])
    more = len(counts) - MAX_NAMED
    return f"{named} and {more:,} more" if more > 0 else named


def _summarise(name: str, output: str) -> None:
    """Prints a data set's published sums, one column per cluster. Raises `BadFile`."""
    path = data_path(SUMMARIES[name], "this data set", name)
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
    to: Annotated[Literal["csv"], typer.Option(help="Format of the output.")] = "csv",
    seed: Seed = 0,
    columns: Columns = None,
    skip_bad: SkipBad = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File for the output; by default stdout."),
    ] = None,
) -> None:
    opened = _open(trace, seed, columns, skip_bad=skip_bad)
    try:
        write_lines(output, trace_lines(opened.jobs))
    except OSError as error:
        if output is None:
            raise
        raise BadCommand(f"{output}: {error.strerror}") from error
    staged = sum(1 for job in opened.jobs if job.stages is not None)
    lost = [*opened.left_out, *([f"the stage times of {staged:,} jobs"] if staged else [])]
    left_out = f"; left out: {', '.join(lost)}" if lost else "; nothing left out"
    console(stderr=True, soft_wrap=True).print(
        f"penstock: {len(opened.jobs):,} jobs written{left_out}", markup=False
    )


convert.__doc__ = f"""Convert a trace to Penstock's CSV, and list the columns that are lost.

{OUR_COLUMNS}
"""
