"""What the page says, from the results of runs: sentences, the table, how it was made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from penstock.model.codec import encode
from penstock.simulator.comparison import CLOCKED, Standing, best_of
from penstock.simulator.report.drawing import MAX_DETAILED, sections
from penstock.simulator.report.metrics import METRICS, RATED, duration, says_something, shown, spread
from penstock.simulator.report.page import Cell, Report, Row
from penstock.simulator.report.picture import Picture
from penstock.simulator.runs import Result


@dataclass(frozen=True, slots=True)
class Background:
    """What holds for all runs of a report, as people should read it."""

    command: str
    title: str
    """The trace and the cluster in short."""
    trace: str
    cluster: str
    truth: str
    more: Sequence[tuple[str, str]] = ()


def report_of(
    background: Background, standings: Sequence[Standing], results: Sequence[Result], warning: str = ""
) -> Report:
    """`standings`: whole runs, profile by profile. Without any, the one broken-off run of `results` is shown."""
    pictures = _pictures(standings, results)
    names = [picture.profile for picture in pictures]
    several = len(standings) > 1
    repeated = any(len(standing.results) > 1 for standing in standings)
    means = {standing.profile: dict(standing.means) for standing in standings}
    shown_runs = sorted(
        (result for result in results if result.picture or result.whole),
        key=lambda one: (names.index(one.profile), one.seed),
    )
    return Report(
        title=f"{', '.join(names)} on {background.title}",
        lead=_lead(standings, results),
        warning=warning,
        command=background.command,
        made_of=[
            ("Trace", background.trace),
            ("Cluster", background.cluster),
            ("Truth", background.truth),
            *background.more,
            ("Drawn from", "the facts in the ledger; the table from the simulation's exact clock"),
            *(
                [("Drawn in detail", f"the first {MAX_DETAILED} policies")]
                if len(names) > MAX_DETAILED
                else []
            ),
            _version(),
        ],
        ledgers=[(one.profile, one.seed, one.figures.ledger_hash) for one in shown_runs],
        settings={one.profile: encode(one.settings).decode() for one in reversed(shown_runs)},
        columns=[_column(standing) for standing in standings] or names,
        rows=_rows(standings, results),
        table_note=_table_note(several, repeated),
        sections=sections(pictures, means if several and repeated else None),
    )


def ledger_report(
    background: Background, picture: Picture, figures: Mapping[str, float | str], name: str
) -> Report:
    """Of a ledger alone: nobody knows how fast its jobs could have been. `figures`: `figures_of`."""
    finished = bool(figures["finished_jobs"])
    mean_s, waited_s = figures["avg_jct_s"], figures["avg_queue_s"]
    assert isinstance(mean_s, float)
    assert isinstance(waited_s, float)
    digest = figures.get("ledger_hash")
    lead = f"{figures['finished_jobs']:,} jobs were finished"
    if finished:
        lead += f": on average {duration(mean_s)} after they came, of which they waited {duration(waited_s)}"
    rows = [
        Row(METRICS[key].label, METRICS[key].means, [_cell(key, value)])
        for key, value in figures.items()
        if not isinstance(value, str) and says_something(key, finished=finished)
    ]
    return Report(
        title=f"{picture.profile} in {name}",
        lead=[f"{lead}."],
        warning="",
        command=background.command,
        made_of=[("Ledger", background.trace), ("Cell", background.cluster), *background.more, _version()],
        ledgers=[(picture.profile, picture.seed, str(digest))] if digest else [],
        settings={},
        columns=[picture.profile],
        rows=rows,
        table_note="Times are of the ledger's clock.",
        sections=sections([picture]),
    )


def _version() -> tuple[str, str]:
    return "Version", f"penstock {version('penstock')}"


def _pictures(standings: Sequence[Standing], results: Sequence[Result]) -> Sequence[Picture]:
    """One per profile: of its first run."""
    if not standings:
        return [result.picture for result in results if result.picture is not None][:1]
    found = ([one.picture for one in standing.results if one.picture is not None] for standing in standings)
    return [pictures[0] for pictures in found if pictures]


def _lead(standings: Sequence[Standing], results: Sequence[Result]) -> Sequence[str]:
    """What came out, in a sentence or two."""
    if not standings:
        figures = results[0].figures
        return [f"{figures.finished_jobs:,} of {results[0].jobs:,} jobs were done when it stopped."]
    key = RATED[0]
    jobs = standings[0].results[0].jobs
    if not any(standing.means["finished_jobs"].mean for standing in standings):
        key = "full_load_allocation"
        figure = {one.profile: 100 * one.means[key].mean for one in standings}
        best = max(figure, key=lambda profile: figure[profile])
        return [
            f"Jobs come until they ask for all GPUs, and none ends. {best} then has {figure[best]:.1f} % of them in use."
        ]
    ranked = sorted(standings, key=lambda one: one.means[key].mean)
    if len(standings) == 1:
        means = ranked[0].means
        waited = means["avg_queue_s"].mean
        of_it = f"of which they waited {duration(waited)}" if waited >= 0.001 else "and none had to wait"
        return [
            f"{jobs:,} jobs: on average done {duration(means[key].mean)} after they came, {of_it}. The last was over "
            f"after {duration(means['makespan_s'].mean)}."
        ]
    first, last = ranked[0], ranked[-1]
    times = last.means[key].mean / max(1e-9, first.means[key].mean)
    sentences = [
        f"{jobs:,} jobs. On average they are done soonest under {first.profile}: {duration(first.means[key].mean)} after "
        f"they came. Under {last.profile} they take {times:.2f} times as long, {duration(last.means[key].mean)}."
    ]
    near = [
        one.profile
        for one in ranked[1:]
        if one.means[key].half_width and one.means[key].meets(first.means[key])
    ]
    if near:
        sentences.append(f"Too close to call against {first.profile}: {', '.join(near)}.")
    return sentences


def _column(standing: Standing) -> str:
    count = len(standing.results)
    return standing.profile + (f" ({count} seeds)" if count > 1 else "")


def _table_note(several: bool, repeated: bool) -> str:
    if not several:
        return "Times are of the simulated clock."
    note = (
        "The best of each row is marked, and so are those whose confidence interval meets that of the best."
    )
    if repeated:
        note += " Below a mean stands half the width of its 95 % confidence interval (Student's t)."
    return note


def _rows(standings: Sequence[Standing], results: Sequence[Result]) -> Sequence[Row]:
    finished = any(result.figures.finished_jobs for result in results)
    rows = []
    for key, metric in METRICS.items():
        if key != "ledger_hash" and says_something(key, finished=finished):
            cells = _cells(standings, key) if standings else [_cell(key, getattr(results[0].figures, key))]
            rows.append(Row(metric.label, metric.means, cells))
    return rows


def _cell(key: str, value: float) -> Cell:
    """One figure; long times also as people say them."""
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
