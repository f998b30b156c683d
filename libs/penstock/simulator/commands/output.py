"""Output of runs and comparisons: tables for the terminal, JSON with fixed keys for programs."""

from collections.abc import Mapping, Sequence
from math import isclose

from rich.console import Console
from rich.table import Table

from penstock.scheduling.profiles import reads_run_times
from penstock.screen import console, plain_table
from penstock.simulator.assumptions import LABELS
from penstock.simulator.comparison import COUNTED, Standing, best_of
from penstock.simulator.results.metrics import METRICS, RESTARTS, UNFINISHED, says_something, shown, spread
from penstock.simulator.runs import Result
from penstock.simulator.statistics import CONFIDENCE, Mean

BEST, WORSE = "★", "▼"
WIDE = 240  # columns
NAME_COLUMNS, PROFILE_COLUMNS = 22, 16


def stdout() -> Console:
    """Console whose tables keep their width, up to WIDE columns when piped."""
    return console(soft_wrap=True, piped_width=WIDE)


def run_keys(result: Result, skipped: int) -> Mapping[str, object]:
    """The keys of one run, the same in `simulate` and `compare`."""
    return {
        "profile": result.profile,
        "durations": _durations(result),
        "seed": result.seed,
        **result.figures._asdict(),
        "skipped_lines": skipped,
        "interrupted": result.interrupted,
    }


def _durations(result: Result) -> str | None:
    """Source of the run times given to the policy; None: it reads none."""
    return result.durations if reads_run_times(result.profile) else None


def print_assumptions(assumed: Mapping[str, str], out: Console) -> None:
    """Prints a line for each assumption."""
    out.print()
    for key, text in assumed.items():
        out.print(f"[dim]{LABELS[key]}:[/] {text}", highlight=False)


def figures_table(keys: Mapping[str, object]) -> Table:
    """Table of one run: name, value, meaning."""
    table = plain_table("figure", "value", right=("value",))
    table.add_column("", style="dim", overflow="fold")
    finished = bool(keys["finished_jobs"])
    for name, value in keys.items():
        if not says_something(name, finished=finished) or (name in (*UNFINISHED, *RESTARTS) and not value):
            continue
        metric = METRICS.get(name)
        table.add_row(name, shown(name, value), metric.means if metric is not None else "")
    return table


# ------------------------------------------------------------------------------------------- comparison


def stopped_runs(results: Sequence[Result]) -> Sequence[Result]:
    """The runs that were in progress when the comparison was stopped."""
    return sorted((one for one in results if one.interrupted), key=lambda one: (one.name, one.seed))


def comparison_keys(
    standings: Sequence[Standing],
    results: Sequence[Result],
    skipped: int,
    interrupted: bool,
    assumed: Mapping[str, str],
) -> Mapping[str, object]:
    """Means with intervals, differences to the first profile, and every run; last those that were stopped."""
    return {
        "confidence": CONFIDENCE,
        "first": standings[0].name if standings else None,
        "interrupted": interrupted,
        "assumptions": assumed,
        "profiles": {
            one.name: {
                "profile": one.results[0].profile,
                "durations": _durations(one.results[0]),
                "runs": len(one.results),
                "deterministic": one.exact,
                "means": {name: _mean_keys(mean) for name, mean in one.means.items()},
                "differences": {name: _mean_keys(mean) for name, mean in one.differences.items()},
            }
            for one in standings
        },
        "runs": [
            *(run_keys(result, skipped) for one in standings for result in one.results),
            *(run_keys(result, skipped) for result in stopped_runs(results)),
        ],
    }


def _mean_keys(mean: Mean) -> Mapping[str, object]:
    return {"mean": mean.mean, "half_width": mean.half_width, "n": mean.n}


def print_comparison(standings: Sequence[Standing], out: Console) -> None:
    """Prints means, then differences; as many profiles side by side as fit on the screen."""
    at_once = max(1, (out.width - NAME_COLUMNS) // PROFILE_COLUMNS)
    for first in range(0, len(standings), at_once):
        out.print(_means_table(standings, standings[first : first + at_once]))
        out.print()
    out.print(
        f"[dim]{BEST} best; {WORSE} its 95 % interval does not meet that of the best; ± half the interval's "
        "width[/]"
    )
    others = [one for one in standings[1:] if one.differences]
    for first in range(0, len(others), at_once):
        out.print()
        out.print(_differences_table(standings[0].name, others[first : first + at_once]))
    if others:
        out.print("\n[dim]mean of the differences, seed by seed; bold: the interval leaves out zero[/]")


def print_stopped(results: Sequence[Result], out: Console) -> None:
    """Prints the figures so far of stopped runs, which are part of no mean."""
    stopped = stopped_runs(results)
    at_once = max(1, (out.width - NAME_COLUMNS) // PROFILE_COLUMNS)
    for first in range(0, len(stopped), at_once):
        table = plain_table("stopped before its end")
        shown_here = stopped[first : first + at_once]
        for one in shown_here:
            table.add_column(f"{one.name}\n[dim]seed {one.seed}[/]", no_wrap=True, justify="right")
        done = (f"{one.figures.finished_jobs:,} of {one.jobs:,}" for one in shown_here)
        table.add_row("jobs done", *done)
        finished = any(one.figures.finished_jobs for one in shown_here)
        for name in COUNTED:
            if METRICS[name].better and name not in RESTARTS and says_something(name, finished=finished):
                table.add_row(name, *(shown(name, getattr(one.figures, name)) for one in shown_here))
        out.print()
        out.print(table)


def _means_table(standings: Sequence[Standing], shown_here: Sequence[Standing]) -> Table:
    """A row per figure, a column per profile. The best is determined among all profiles."""
    table = plain_table("figure")
    for one in shown_here:
        runs = (
            "deterministic: 1 run"
            if one.exact
            else f"{len(one.results)} seed{'s' if len(one.results) > 1 else ''}"
        )
        table.add_column(f"{one.name}\n[dim]{runs}[/]", no_wrap=True, justify="right")
    for name in _shown_figures(standings):
        best = best_of(standings, name, METRICS[name].better)
        table.add_row(name, *(_marked(one.means[name], best, name) for one in shown_here))
    return table


def _shown_figures(standings: Sequence[Standing]) -> Sequence[str]:
    """Figures that have a meaning in this comparison."""
    return [
        name
        for name in COUNTED
        if METRICS[name].better or name in ("gpu_allocation", "preemptions", "events_per_s")
        if name not in RESTARTS or any(one.means[name].mean for one in standings)
        if says_something(name, finished=any(one.means["finished_jobs"].mean for one in standings))
    ]


def _marked(mean: Mean, best: Mean | None, name: str) -> str:
    half = f"\n{spread(name, mean.half_width)}  " if mean.half_width else ""
    text = shown(name, mean.mean)
    if best is None:
        return f"{text}  {half}"
    if isclose(mean.mean, best.mean):
        return f"[bold green]{text} {BEST}[/]{half}"
    return f"{text}  {half}" if mean.meets(best) else f"[dim]{text} {WORSE}{half}[/]"


def _differences_table(first: str, others: Sequence[Standing]) -> Table:
    """Differences to the first profile."""
    table = plain_table(f"against {first}")
    for one in others:
        table.add_column(one.name, no_wrap=True, justify="right")
    for name in _shown_figures(others):
        if METRICS[name].better and all(name in one.differences for one in others):
            table.add_row(name, *(_difference(one.differences[name], name) for one in others))
    return table


def _difference(mean: Mean, name: str) -> str:
    """Bold where the interval leaves out zero."""
    sign = "+" if mean.mean > 0 else "−" if mean.mean < 0 else ""
    text = sign + shown(name, abs(mean.mean))
    text += f"\n{spread(name, mean.half_width)}" if mean.half_width else ""
    sure = mean.half_width is not None and abs(mean.mean) > mean.half_width
    return f"[bold]{text}[/]" if sure else f"[dim]{text}[/]"
