"""`python -m tests.papers.estimator DATA`: figures on stdout, what was rejected on stderr."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson

from penstock.runtime.files.csv_import import shown
from penstock_services.estimator.core.resource_model.measurements import Runs
from tests.papers.estimator import left_out, step_evaluation
from tests.papers.estimator.cross_validation import (
    FEWEST_REPEATS,
    FOLDS,
    MODELS,
    SPLITS,
    Judged,
    TooFew,
    cross_judge,
    floor,
    judge_on,
)
from tests.papers.estimator.files.curve_files import holds_curves, read_curves, read_totals
from tests.papers.estimator.files.run_files import BadData, Read, read_runs
from tests.papers.estimator.files.step_files import holds_steps
from tests.papers.estimator.models.phases import Phased, judge_phases
from tests.papers.estimator.step_validation import MODELS as STEP_MODELS
from tests.papers.estimator.step_validation import SPLITS as STEP_SPLITS

OK, BAD_INPUT = 0, 2
MOST_SEEDS = 1_000

Figures = dict[str, dict[str, dict[str, float]]]
"""Label → figure → its mean and standard deviation over the seeds."""


def add_arguments(to: argparse.ArgumentParser) -> None:
    to.add_argument(
        "data",
        type=Path,
        help="a CSV file of measured runs or of step times, one a line, or a folder of such; with --left-out "
        "also one "
        "that holds charrnn/, pollux/ or zeus/",
    )
    to.add_argument(
        "--kind",
        choices=("runs", "steps"),
        help="what DATA holds; by default steps where a header has placement and step_time",
    )
    to.add_argument(
        "--split",
        choices=tuple(dict.fromkeys((*SPLITS, *STEP_SPLITS, "kinds"))),
        default="cells",
        help=f"what is held out together. Of runs, in {FOLDS} folds: cells (GPU model, GPUs, workload and "
        "precision), "
        "both-precisions (the same at any precision), families (GPU models), generations (of GPU models), "
        "networks, or single runs at random. Of steps: cells, or "
        "placements at all batches",
    )
    to.add_argument(
        "--left-out",
        action="store_true",
        help=f"leave each group of --split ({', '.join(left_out.GROUPS)}; kinds of training where DATA holds "
        "curves) out "
        "alone, and show group by group how often our intervals hold, two-sided and one-sided",
    )
    to.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="train on DATA, judge on these; no split of what is in both",
    )
    to.add_argument(
        "--model",
        action="append",
        choices=tuple(dict.fromkeys((*MODELS, *STEP_MODELS))),
        help="may be repeated; by default penstock and liquid, of steps " + ", ".join(STEP_MODELS),
    )
    to.add_argument(
        "--measured",
        action="append",
        metavar="N",
        help="of steps: so many cells of a network, where its plan says, or a share of them by chance; may "
        "be repeated; "
        f"by default {' and '.join(step_evaluation.MEASURED)}",
    )
    to.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds; tells mean ± sd")
    to.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(asked: argparse.Namespace) -> int:
    """Exit codes: 0 done, 2 bad command or data."""
    if not 1 <= asked.seeds <= MOST_SEEDS:
        return refuse(f"--seeds: between 1 and {MOST_SEEDS}")
    if asked.left_out:
        return run_left_out(asked)
    if asked.kind == "steps" or (asked.kind is None and holds_steps(asked.data)):
        return step_evaluation.run(asked, report)
    problems = [
        f"{option} {name}: of runs, choose {', '.join(known)}"
        for option, names, known in (
            ("--split", [asked.split], SPLITS),
            ("--model", asked.model or (), MODELS),
        )
        for name in names
        if name not in known
    ]
    if asked.measured:
        problems.append("--measured: of step times alone")
    files: list[Read | None] = []
    for path in (asked.data, asked.against):
        try:
            files.append(None if path is None else read_runs(path))
        except BadData as error:
            problems.append(str(error))
    if problems:
        return refuse("\n".join(problems))
    read, against = files
    assert read is not None
    for path, file in ((asked.data, read), (asked.against, against)):
        if file is not None and file.rejected:
            report(f"{path}: {len(file.rejected)} runs rejected, {len(file.runs)} kept")
            for reason, count in file.reasons().items():
                first = next(one.where for one in file.rejected if one.reason == reason)
                report(f"  {count} × {reason} (first: {first})")
        if file is not None and file.ignored:
            report(f"{path}: columns that are not looked at: {', '.join(map(shown, file.ignored))}")
    if against is not None:
        count = len(against.runs)
        against = unseen(read, against)
        if twice := count - len(against.runs):
            report(f"{twice} runs of {asked.against} are in {asked.data} too and are not asked")
        if not len(against.runs):
            return refuse(
                f"nothing is left to ask about: {asked.data} has all runs of {asked.against}; name newer ones"
            )
    models = list(dict.fromkeys(asked.model or ("penstock", "liquid")))
    try:
        found = {name: figures(name, read, against, asked.split, asked.seeds) for name in models}
        if read.phased is not None and against is None:
            for name, of_phases in phase_figures(read.phased, asked.split, asked.seeds).items():
                if name in found:
                    found[name] |= of_phases
    except TooFew as error:
        return refuse(str(error))
    if not any(found.values()):
        return refuse(
            f"{asked.data}: nothing that both measured can be compared; name files with the same labels"
        )
    show(asked, read, against, found)
    return OK


def run_left_out(asked: argparse.Namespace) -> int:
    """Exit codes: 0 done, 2 bad command or data."""
    curves = asked.data.is_dir() and holds_curves(asked.data)
    splits = ("kinds",) if curves else left_out.GROUPS
    if asked.split not in splits:
        return refuse(f"--split {asked.split}: with --left-out of this data, choose {' or '.join(splits)}")
    try:
        if curves:
            rows = left_out.of_curves(read_curves(asked.data)) + left_out.of_totals(read_totals(asked.data))
        else:
            rows = left_out.of_runs(read_runs(asked.data).runs, asked.split)
    except (BadData, TooFew) as error:
        return refuse(str(error))
    if not rows:
        return refuse(f"{asked.data}: no group has {left_out.FEWEST} values to ask about")
    if asked.output == "json":
        whole = {"data": str(asked.data), "split": asked.split, "groups": [row._asdict() for row in rows]}
        sys.stdout.buffer.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
    else:
        print(left_out.table(rows))
        print(
            "\n`above`: over the upper end, which of GPU memory is the promise. Nothing was learned from the "
            "group."
        )
    return OK


def unseen(read: Read, against: Read) -> Read:
    """`against` without the runs that `read` holds, line for line: what taught a model does not judge it."""

    def lines(runs: Runs) -> list[str]:
        labels = sorted(runs.labels.items())
        return [
            f"{task} {[(name, float(column[row])) for name, column in labels]}"
            for row, task in enumerate(runs.tasks)
        ]

    taught = set(lines(read.runs))
    new = np.array([line not in taught for line in lines(against.runs)], dtype=np.bool_)
    return replace(against, runs=against.runs.pick(new))


def refuse(text: str) -> int:
    for line in text.splitlines():
        report(line)
    return BAD_INPUT


def report(text: str) -> None:
    print(f"penstock: {text}", file=sys.stderr)


def figures(model: str, read: Read, against: Read | None, split: str, seeds: int) -> Figures:
    """Over `seeds` seeds. Raises `TooFew`."""
    predicted: list[Mapping[str, Judged]] = [
        judge_on(read.runs, against.runs, model, seed)
        if against is not None
        else cross_judge(read.runs, model, split, seed)
        for seed in range(seeds)
    ]
    return over_seeds(predicted)


def phase_figures(phased: Phased, split: str, seeds: int) -> Mapping[str, Figures]:
    """Model → figures of the phase times: of Liquid's second model, and of the medians that answer here.
    Raises `TooFew`."""
    predicted = [judge_phases(phased, split, seed) for seed in range(seeds)]
    return {name: over_seeds([one[name] for one in predicted]) for name in predicted[0]}


def over_seeds(predicted: Sequence[Mapping[str, Judged]]) -> Figures:
    """At least one."""
    found: Figures = {}
    for label in predicted[0]:
        columns = {
            name: np.array([getattr(one[label], name) for one in predicted]) for name in Judged._fields
        }
        found[label] = {
            name: {"mean": float(values.mean()), "sd": float(values.std())}
            for name, values in columns.items()
        }
    return found


def show(asked: argparse.Namespace, read: Read, against: Read | None, found: Mapping[str, Figures]) -> None:
    """On stdout."""
    judged = read if against is None else against
    ceiling = floor(judged.runs, FEWEST_REPEATS)
    if asked.output == "json":
        whole = {
            "data": str(asked.data),
            "against": None if asked.against is None else str(asked.against),
            "kind": "runs",
            "split": None if asked.against is not None else asked.split,
            "seeds": asked.seeds,
            "runs": len(read.runs),
            "set_aside": read.reasons(),
            "columns_not_looked_at": list(read.ignored),
            "models": found,
            "highest_r2": ceiling,
        }
        sys.stdout.buffer.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
        return
    heads = ("label", "model", "R²", "RMSE", "MAE", "p95 error", "in 90 %", "width", "runs")
    rows: list[tuple[str, ...]] = [heads]
    for label in dict.fromkeys(label for predicted in found.values() for label in predicted):
        rows += [
            _row(label, name, predicted[label], asked.seeds)
            for name, predicted in found.items()
            if label in predicted
        ]
        if label in ceiling:
            rows.append((label, "repeats", f"{ceiling[label]:.3f}", *[""] * (len(heads) - 3)))
    wide = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    for row in rows:
        first = [text.ljust(size) for text, size in zip(row[:2], wide[:2], strict=True)]
        rest = [text.rjust(size) for text, size in zip(row[2:], wide[2:], strict=True)]
        print("  ".join([*first, *rest]).rstrip())
    print("\nR² of throughput is that of its logarithm.")
    if ceiling:
        print("`repeats`: the R² that no model can exceed, from repeated cells.")


def _row(label: str, model: str, predicted: Mapping[str, Mapping[str, float]], seeds: int) -> tuple[str, ...]:
    r2, rmse, mae, p95, coverage, width = (
        predicted[name] for name in ("r2", "rmse", "mae", "p95_relative", "coverage", "width")
    )
    spread = f" ± {r2['sd']:.3f}" if seeds > 1 else ""
    inside = "" if math.isnan(coverage["mean"]) else f"{100 * coverage['mean']:.1f} %"
    return (
        label,
        model,
        f"{r2['mean']:.3f}{spread}",
        f"{rmse['mean']:,.4g}",
        f"{mae['mean']:,.4g}",
        f"{100 * p95['mean']:,.1f} %",
        inside,
        "" if math.isnan(width["mean"]) else f"{width['mean']:,.4g}",
        f"{predicted['runs']['mean']:.0f}",
    )
