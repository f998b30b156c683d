"""`python -m tests.papers.estimator DATA` on measured step times: how far each model is off on cells it was
not shown."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock.runtime.files.csv_import import shown
from penstock_services.estimator.core.records.placements import Table
from penstock_services.estimator.core.step_time.fit import learn_prior, reference_batch
from penstock_services.estimator.core.step_time.prior import Prior
from tests.papers.estimator.files.run_files import BadData
from tests.papers.estimator.files.step_files import Steps, read_steps
from tests.papers.estimator.step_validation import (
    MODELS,
    SPLITS,
    Errors,
    Judged,
    errors,
    genies_light,
    judged,
    light,
    noise,
    share_of,
    without,
)

OK, BAD_INPUT = 0, 2
MOST_POINTS = 60
MEASURED = ("15", "0.5")
FEWEST_NEIGHBOURS = 10  # batches between two others; fewer show no scatter
FEWEST_CELLS = 4  # for a half to be drawn
NETWORK = "network"

Whose = tuple[str, str]
"""(NETWORK, its name), or what is told of all of them."""
POOLED: Whose = ("pooled", "")
MEAN: Whose = ("mean", "")

Tell = Callable[[str], None]
Figures = Mapping[str, Mapping[str, float]]
"""Figure → its mean and standard deviation over the seeds."""


class Case(NamedTuple):
    """One network's step times: what may be measured, and what is asked; without `asked`, all that was not
    measured."""

    model: str
    pool: Table
    asked: Table | None
    prior: Prior


class Drawn(NamedTuple):
    """`points` > 0: as many, where a plan says; else a share of all."""

    text: str
    points: int
    share: float


def run(asked: argparse.Namespace, report: Tell) -> int:
    """Exit codes: 0 done, 2 bad command or data."""
    problems, drawn = _drawn(asked.measured or MEASURED)
    names = list(dict.fromkeys(asked.model or MODELS))
    problems += [
        f"--model {name}: of step times, choose {', '.join(MODELS)}" for name in names if name not in MODELS
    ]
    if asked.split not in SPLITS:
        problems.append(f"--split {asked.split}: of step times, choose {' or '.join(SPLITS)}")
    files: list[Steps | None] = []
    for path in (asked.data, asked.against):
        try:
            files.append(None if path is None else read_steps(path))
        except BadData as error:
            problems.append(str(error))
    if problems:
        for problem in problems:
            report(problem)
        return BAD_INPUT
    read, against = files
    assert read is not None
    for path, file in ((asked.data, read), (asked.against, against)):
        if file is not None:
            _report_of(str(path), file, report)
    cases = _cases(read, against)
    for case in cases:
        twice = 0 if case.asked is None else len(case.asked.cells) - len(without(case.asked, case.pool).cells)
        if twice:
            report(
                f"{case.model}: {twice} cells of {asked.against} are in {asked.data} too and are not asked"
            )
    found: dict[str, Mapping[str, Mapping[Whose, Figures]]] = {}
    if all(case.asked is not None for case in cases):
        drawn = [Drawn("all", 0, 1.0)]
    for one in drawn:
        usable = [case for case in cases if case.asked is not None or _enough(case, one)]
        for case in cases:
            if case not in usable:
                report(
                    f"{case.model}: {len(case.pool.cells)} cells are too few to measure {one.text} and ask "
                    "for others"
                )
        if any(case.asked is None or without(case.asked, case.pool).cells for case in usable):
            found[one.text] = _figures(names, usable, one, asked.split, asked.seeds)
    if not found:
        if cases and all(case.asked is not None for case in cases):
            report(f"nothing is left to ask about: {asked.data} has all cells of {asked.against}")
        return BAD_INPUT
    judged_on = read if against is None else against
    floor = {model: noise(table) for model, table in judged_on.tables.items()}
    _show(asked, read, floor, found)
    return OK


def _drawn(texts: Sequence[str]) -> tuple[list[str], list[Drawn]]:
    problems, found = [], []
    for text in dict.fromkeys(texts):
        if text.isdecimal() and text.isascii() and len(text) < 6 and 1 <= int(text) <= MOST_POINTS:
            found.append(Drawn(text, int(text), 0.0))
            continue
        try:
            share = float(text)
        except ValueError:
            share = math.nan
        if 0 < share < 1:
            found.append(Drawn(text, 0, share))
        else:
            problems.append(f"--measured {text[:40]}: 1 to {MOST_POINTS} points, or a share between 0 and 1")
    return problems, found


def _report_of(path: str, file: Steps, report: Tell) -> None:
    if file.rejected:
        report(f"{path}: {len(file.rejected)} measurements rejected, {file.measured} kept")
        for reason, count in file.reasons().items():
            first = next(one.where for one in file.rejected if one.reason == reason)
            report(f"  {count} × {reason} (first: {first})")
    if file.ignored:
        report(f"{path}: columns that are not looked at: {', '.join(map(shown, file.ignored))}")
    if file.other_files:
        report(f"{path}: {file.other_files} CSV files are no tables of placements and step times")


def _cases(read: Steps, against: Steps | None) -> list[Case]:
    """Each model is taught by the other models of `read` alone, on whatever GPU.

    With `against`: of a model that both hold, what `read` has is measured and what `against` has is asked.
    """
    judged_on = read if against is None else against
    cases = []
    for model, table in judged_on.tables.items():
        network = judged_on.networks[model]
        others = [other for name, other in read.tables.items() if read.networks[name] != network]
        prior = learn_prior(others, np.random.default_rng(1))
        both = against is not None and model in read.tables
        cases.append(Case(model, read.tables[model] if both else table, table if both else None, prior))
    return cases


def _enough(case: Case, drawn: Drawn) -> bool:
    return len(case.pool.cells) >= max(FEWEST_CELLS, drawn.points + 1)


def _figures(
    names: Sequence[str], cases: Sequence[Case], drawn: Drawn, split: str, seeds: int
) -> Mapping[str, Mapping[Whose, Figures]]:
    """Model of steps → whose steps → figures: each network's, `pooled` over all cells, `mean` of the
    networks' figures."""
    predicted: dict[str, list[Mapping[Whose, Judged]]] = {name: [] for name in names}
    for seed in range(seeds):
        parts: dict[str, dict[str, Errors]] = {name: {} for name in names}
        for case in cases:
            for name, found in _errors(names, case, drawn, split, seed).items():
                parts[name][case.model] = found
        for name, mine in parts.items():
            every = {(NETWORK, model): judged([part]) for model, part in mine.items()}
            predicted[name].append(every | {POOLED: judged(list(mine.values()))})
    return {name: _over_seeds(one) for name, one in predicted.items()}


def _over_seeds(predicted: Sequence[Mapping[Whose, Judged]]) -> Mapping[Whose, Figures]:
    networks = [name for name in predicted[0] if name != POOLED]

    def figures(whose: Whose) -> Figures:
        return {
            figure: _over([getattr(one[whose], figure) for one in predicted]) for figure in Judged._fields
        }

    mean = {
        figure: _over(
            [float(np.mean([getattr(one[whose], figure) for whose in networks])) for one in predicted]
        )
        for figure in ("median", "p95", "coverage")
    }
    return {**{whose: figures(whose) for whose in networks}, POOLED: figures(POOLED), MEAN: mean}


def _errors(names: Sequence[str], case: Case, drawn: Drawn, split: str, seed: int) -> Mapping[str, Errors]:
    """Of one network, by each model that is shown the same cells; GENIE's light profile is its own."""
    shown = _shown(case, drawn, split, seed)
    found = {}
    for name in names:
        own = name == "genie" and drawn.points and case.asked is None
        mine = genies_light(case.pool, drawn.points) if own else shown
        rest = without(case.pool if case.asked is None else case.asked, mine)
        if mine.cells and rest.cells:
            speak = MODELS[name](mine, case.prior, reference_batch(case.pool), np.random.default_rng(seed))
            found[name] = errors(speak(rest.cells), rest)
        else:
            found[name] = Errors(np.zeros(0), np.zeros(0))
    return found


def _shown(case: Case, drawn: Drawn, split: str, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    if case.asked is not None:
        return case.pool
    if drawn.points:
        return light(case.pool, case.prior, drawn.points, rng)
    return share_of(case.pool, drawn.share, split, rng)


def _over(values: Sequence[float]) -> Mapping[str, float]:
    with np.errstate(invalid="ignore"):  # of figures that are endless
        return {"mean": float(np.mean(values)), "sd": float(np.std(values))}


def _show(
    asked: argparse.Namespace,
    read: Steps,
    floor: Mapping[str, Any],
    found: Mapping[str, Mapping[str, Mapping[Whose, Figures]]],
) -> None:
    """On stdout."""
    parts = {(NETWORK, model): [Errors(part, np.zeros(0))] for model, part in floor.items()}
    parts[POOLED] = [one for own in parts.values() for one in own]
    scatter = {whose: judged(own) for whose, own in parts.items()}
    floors = {whose: one for whose, one in scatter.items() if one.cells >= FEWEST_NEIGHBOURS}
    if asked.output == "json":
        whole = {
            "data": str(asked.data),
            "against": None if asked.against is None else str(asked.against),
            "kind": "steps",
            "split": None if asked.against is not None else asked.split,
            "seeds": asked.seeds,
            "cells": {model: len(table.cells) for model, table in read.tables.items()},
            "set_aside": read.reasons(),
            "columns_not_looked_at": list(read.ignored),
            "measured": {
                text: {name: _nested(predicted) for name, predicted in by_name.items()}
                for text, by_name in found.items()
            },
            "noise": _nested(
                {whose: {"median": one.median, "p95": one.p95} for whose, one in floors.items()}
            ),
        }
        sys.stdout.buffer.write(orjson.dumps(whole, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
        sys.stdout.buffer.flush()
        return
    heads = ("measured", "of", "model", "median", "p95", "in 90 %", "cells")
    lines: list[tuple[str, ...]] = [heads]
    for text, by_name in found.items():
        for of in next(iter(by_name.values())):
            lines += [
                _row(text, " ".join(of).strip(), name, predicted[of], asked.seeds)
                for name, predicted in by_name.items()
            ]
    for of, one in floors.items():
        lines.append(("–", " ".join(of).strip(), "noise", _percent(one.median), _percent(one.p95), "", ""))
    wide = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        first = [text.ljust(size) for text, size in zip(line[:3], wide[:3], strict=True)]
        rest = [text.rjust(size) for text, size in zip(line[3:], wide[3:], strict=True)]
        print("  ".join([*first, *rest]).rstrip())
    print(
        "\nError: |predicted / measured − 1|. `genie` speaks of even placements alone; a light profile is "
        "its own."
    )
    if floors:
        print("`noise`: what single measurements scatter by, from their neighbours in batch size; no model")
        print("falls far below.")


def _nested(predicted: Mapping[Whose, Mapping[str, Any]]) -> Mapping[str, Any]:
    networks = {name: figures for (kind, name), figures in predicted.items() if kind == NETWORK}
    return {"networks": networks} | {
        kind: figures for (kind, _), figures in predicted.items() if kind != NETWORK
    }


def _row(measured: str, of: str, name: str, predicted: Figures, seeds: int) -> tuple[str, ...]:
    spread = f" ± {100 * predicted['p95']['sd']:.1f}" if seeds > 1 else ""
    inside = predicted["coverage"]["mean"]
    return (
        measured,
        of,
        name,
        _percent(predicted["median"]["mean"]),
        _percent(predicted["p95"]["mean"]) + spread,
        "" if math.isnan(inside) else f"{100 * inside:.1f} %",
        f"{predicted['cells']['mean']:.0f}" if "cells" in predicted else "",
    )


def _percent(value: float) -> str:
    return "" if math.isnan(value) else "endless" if math.isinf(value) else f"{100 * value:.1f} %"
