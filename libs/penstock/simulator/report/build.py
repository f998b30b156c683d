"""Texts and tables of a simulator's report, from the results of runs or from a ledger."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NamedTuple

from penstock.charts.report import Cell, Folded, Page, Section, Table
from penstock.model.wire.codec import encode
from penstock.simulator.assumptions import LABELS
from penstock.simulator.comparison import CLOCKED, COUNTED, Standing, best_of
from penstock.simulator.results.metrics import (
    METRICS,
    RATED,
    RESTARTS,
    UNFINISHED,
    duration,
    says_something,
    shown,
    spread,
)
from penstock.simulator.results.series import MAX_DETAILED, RunSeries
from penstock.simulator.runs import Result

SHOWN_BELOW = (LABELS["run_times"], LABELS["restarts"])
MAX_UNFOLDED = 4  # ledger hashes that the page shows without unfolding


class Background(NamedTuple):
    """Data common to all runs of a report."""

    command: str
    title: str
    """The trace and the cluster in short."""
    trace: str
    cluster: str
    job_model: str
    assumptions: Sequence[tuple[str, str]] = ()
    """(label, sentence): assumptions of the simulation that may not hold in a cluster."""
    more: Sequence[tuple[str, str]] = ()


def report_of(
    background: Background, standings: Sequence[Standing], results: Sequence[Result], warning: str = ""
) -> Page:
    """The page of a comparison. `standings`: complete runs, profile by profile. Without any, the one aborted
    run of `results` is shown."""
    series = _series(standings, results)
    names = [one.name for one in series]
    repeated = any(len(standing.results) > 1 for standing in standings)
    runs = sorted(
        (result for result in results if result.series or result.whole),
        key=lambda one: (names.index(one.name), one.seed),
    )
    ledgers = [(f"{one.name}, seed {one.seed}", f"ledger {one.figures.ledger_hash}") for one in runs]
    settings = {one.name: encode(one.settings).decode() for one in reversed(runs)}
    folded = [Folded("Settings of the placer, as the ledger records them", list(settings.items()))]
    if len(ledgers) > MAX_UNFOLDED:
        folded.insert(0, Folded(f"Seeds and ledger hashes of {len(runs)} runs", ledgers))
    made_of = [
        ("Trace", background.trace),
        ("Cluster", background.cluster),
        ("Job model", background.job_model),
        *background.more,
        ("Charts from", "the facts in the ledger; the table is from the simulation's exact clock"),
    ]
    if len(names) > MAX_DETAILED:
        made_of.append(("Charts of their own", f"the first {MAX_DETAILED} policies"))
    table = Table(["", *([_column(standing) for standing in standings] or names)], _rows(standings, results))
    return Page(
        title=f"{', '.join(names)} on {background.title}",
        lead=_lead(standings, results),
        command=background.command,
        remarks=[f"{label}: {text}" for label, text in background.assumptions],
        sections=_sections(
            table,
            _note(len(standings) > 1, repeated),
            series,
            made_of,
            _assumed(background, f"Seed {series[0].seed}."),
        ),
        warning=warning,
        facts=ledgers if len(ledgers) <= MAX_UNFOLDED else (),
        folded=folded,
    )


def ledger_report(
    background: Background, series: RunSeries, figures: Mapping[str, float | str], name: str
) -> Page:
    """The page of a ledger alone, which does not have its jobs' speeds alone. `figures`: of `figures_of`."""
    finished = bool(figures["finished_jobs"])
    lead = f"{figures['finished_jobs']:,} jobs were finished"
    if finished:
        mean, waited = (duration(float(figures[key])) for key in ("avg_jct_s", "avg_queue_s"))
        lead += f": on average {mean} after their submission, of which they waited {waited}"
    rows = [
        [_heading(key), _cell(key, value)]
        for key, value in figures.items()
        if not isinstance(value, str)
        and says_something(key, finished=finished)
        and (value or key not in UNFINISHED)
    ]
    digest = figures.get("ledger_hash")
    made_of = [("Ledger", background.trace), ("Cell", background.cluster), *background.more]
    return Page(
        title=f"{series.name} in {name}",
        lead=[f"{lead}."],
        command=background.command,
        remarks=[f"{label}: {text}" for label, text in background.assumptions],
        sections=_sections(
            Table(["", series.name], rows),
            "Times are of the ledger's clock.",
            [series],
            made_of,
            _assumed(background),
        ),
        facts=[(f"{series.name}, seed {series.seed}", f"ledger {digest}")] if digest else (),
    )


def _sections(
    table: Table,
    note: str,
    series: Sequence[RunSeries],
    made_of: Sequence[tuple[str, str]],
    assumed: str = "",
) -> Sequence[Section]:
    """Figures, charts, and how the report was made."""
    from penstock.simulator.report.charts import sections  # Altair takes 0.3 s

    facts = [*made_of, ("Version", f"penstock {version('penstock')}")]
    return [
        Section("figures", "Figures", note, table=table),
        *sections(series, assumed),
        *_latencies(series),
        Section("made", "How this was made", facts=facts),
    ]


def _assumed(background: Background, *more: str) -> str:
    """The assumptions as one text, for a picture that is shown alone."""
    sentences = [f"{label}: {text}" for label, text in background.assumptions if label in SHOWN_BELOW]
    return " ".join([*sentences, *more] if sentences else [])


def _latencies(runs: Sequence[RunSeries]) -> Sequence[Section]:
    """The placer's decision latency, by kind of input."""
    rows = [
        [
            Cell(latency.kind.removeprefix("penstock.").replace(".", " ").replace("_", " "), run.name),
            Cell(f"{latency.inputs:,}"),
            *(
                Cell(f"{micros:,.0f} µs" if micros < 10_000 else f"{micros / 1_000:,.1f} ms")
                for micros in latency.micros
            ),
        ]
        for run in runs[:MAX_DETAILED]
        for latency in run.latencies
    ]
    if not rows:
        return ()
    caption = (
        "Real time from an input to its decisions, on this machine, by kind of input. Measured with a "
        "clock: it differs from run to run, and contains what other programs took of the processor."
    )
    columns = ["", "inputs", "median", "90th percentile", "99th percentile", "longest"]
    return [Section("latency", "Decision latency of the placer", caption, table=Table(columns, rows))]


def _series(standings: Sequence[Standing], results: Sequence[Result]) -> Sequence[RunSeries]:
    """The series of each profile's first run."""
    if not standings:
        return [result.series for result in results if result.series is not None][:1]
    found = ([one.series for one in standing.results if one.series is not None] for standing in standings)
    return [series[0] for series in found if series]


def _lead(standings: Sequence[Standing], results: Sequence[Result]) -> Sequence[str]:
    """The outcome in a sentence or two."""
    if not standings:
        figures = results[0].figures
        return [f"{figures.finished_jobs:,} of {results[0].jobs:,} jobs were done when it stopped."]
    key = RATED[0]
    jobs = standings[0].results[0].jobs
    if not any(standing.means["finished_jobs"].mean for standing in standings):
        best = max(standings, key=lambda one: one.means["full_load_allocation"].mean)
        share = 100 * best.means["full_load_allocation"].mean
        return [
            f"Jobs come until they ask for all GPUs, and none ends. {best.name} then has {share:.1f} % of "
            "them in use."
        ]
    ranked = sorted(standings, key=lambda one: one.means[key].mean)
    first, last = ranked[0], ranked[-1]
    mean = first.means[key]
    if len(standings) == 1:
        waited = first.means["avg_queue_s"].mean
        of_it = f"of which they waited {duration(waited)}" if waited >= 0.001 else "and none had to wait"
        return [
            f"{jobs:,} jobs: on average done {duration(mean.mean)} after their submission, {of_it}. The "
            f"last ended after {duration(first.means['makespan_s'].mean)}."
        ]
    times = last.means[key].mean / max(1e-9, mean.mean)
    sentences = [
        f"{jobs:,} jobs. On average they are done soonest under {first.name}: {duration(mean.mean)} after "
        f"their submission. Under {last.name} they take {times:.2f} times as long, "
        f"{duration(last.means[key].mean)}."
    ]
    near = [one.name for one in ranked[1:] if one.means[key].half_width and one.means[key].meets(mean)]
    if near:
        sentences.append(f"Too close to call against {first.name}: {', '.join(near)}.")
    return sentences


def _column(standing: Standing) -> str:
    count = len(standing.results)
    return standing.name + (f" ({count} seeds)" if count > 1 else "")


def _note(several: bool, repeated: bool) -> str:
    if not several:
        return "Times are of the simulated clock."
    note = "Marked: the best of each row, and those whose confidence interval overlaps that of the best."
    return note + (
        " Below a mean is half the width of its 95 % confidence interval (Student's t)." if repeated else ""
    )


def _rows(standings: Sequence[Standing], results: Sequence[Result]) -> list[list[Cell]]:
    finished = any(result.figures.finished_jobs for result in results)
    keys = [
        key
        for key in METRICS
        if key in COUNTED and says_something(key, finished=finished)
        if key not in RESTARTS or any(getattr(result.figures, key) for result in results)
    ]
    return [
        [
            _heading(key),
            *(_cells(standings, key) if standings else [_cell(key, getattr(results[0].figures, key))]),
        ]
        for key in keys
    ]


def _heading(key: str) -> Cell:
    return Cell(METRICS[key].label, METRICS[key].means)


def _cell(key: str, value: float) -> Cell:
    """A table cell with one figure; long times also in larger units."""
    return Cell(shown(key, value), duration(value) if METRICS[key].unit == "s" and value >= 60 else "")


def _cells(standings: Sequence[Standing], key: str) -> list[Cell]:
    best = best_of(standings, key, METRICS[key].better)
    cells = []
    for standing in standings:
        mean = standing.means[key]
        cell = _cell(key, mean.mean)
        small = spread(key, mean.half_width) if mean.half_width and key not in CLOCKED else cell.small
        marked = best is not None and (
            mean.mean == best.mean or (mean.half_width is not None and mean.meets(best))
        )
        cells.append(Cell(cell.text, small, marked))
    return cells
