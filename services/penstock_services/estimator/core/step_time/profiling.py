"""Lightweight profiling of one network on one kind of GPU: which runs reduce the uncertainty about its
iterations most, and what is known of each placement.

Ideal: B × N × G runs, each batch on each ⟨nodes, GPUs per node⟩. Departure: B + N + G of them at most
(Source: GENIE §II-B), and instead of those on the axes the most useful ones by the model's own covariance
(`profile_plan`). Only placements that the cell packs for a gang are considered, since no others are queried.
"""

from collections.abc import Mapping, Sequence
from math import exp, log, sqrt
from typing import Any, NamedTuple

from penstock.text.counting import count
from penstock_services.estimator.core.eta.quantiles import LEVEL
from penstock_services.estimator.core.node_capacity import NodeCapacity, densest
from penstock_services.estimator.core.records.placements import Cell, Placement, table
from penstock_services.estimator.core.records.runs import FinishedRun
from penstock_services.estimator.core.step_time.fit import fit, reference_batch
from penstock_services.estimator.core.step_time.model import StepModel
from penstock_services.estimator.core.step_time.prior import Prior
from penstock_services.estimator.core.step_time.profile_plan import MAX_PLANNED, profile_plan
from penstock_services.estimator.core.step_time.training_set import (
    SHARED,
    cell_of,
    name_of,
    samples_of,
    tables_of,
)

MAX_LOG = 50.0  # of a width: a larger one means that nothing is known


class Asked(NamedTuple):
    """The network and the range to profile."""

    owner: str
    model: str
    workers: Sequence[int]
    batches: Sequence[int]
    """Of all workers together."""
    gpus: int = 1
    """Of each worker."""
    gpu_models: Sequence[str] = ()
    runs: int | None = None
    """At most; None: B + N + G."""


class Shape(NamedTuple):
    """A number of workers with a global batch, and where the cell packs it."""

    workers: int
    batch: int
    placement: Placement
    cell: Cell


class NothingFits(ValueError):
    """The cell can hold none of the placements to profile."""


def profile(asked: Asked, nodes: NodeCapacity, runs: Sequence[FinishedRun], prior: Prior) -> dict[str, Any]:
    """`gpu`: on which kind; `cells`: the known times of each; `plan`: runs to make, the most useful first;
    `spread_before`, `spread_after`.

    Spreads are roots of the mean variance of ln t over the cells. Raises `NothingFits`.
    """
    gpu, shapes = _shapes(asked, nodes)
    model = _model(asked, gpu, shapes, runs, prior)
    most = min(light_runs(shapes), MAX_PLANNED) if asked.runs is None else min(asked.runs, MAX_PLANNED)
    cells = [shape.cell for shape in shapes]
    probes = profile_plan(model, cells, [1.0] * len(cells), most)
    known = [_known(model, shape) for shape in shapes]
    at = {shape.cell: number for number, shape in reversed(list(enumerate(shapes)))}
    plan = [
        {
            **{
                name: known[at[probe.cell]][name]
                for name in ("workers", "batch", "nodes", "gpus_per_node", "step_ms")
            },
            "spread_before": probe.spread_before,
            "spread_after": probe.spread_after,
        }
        for probe in probes
    ]
    before = probes[0].spread_before if probes else _spread(model, cells)
    after = probes[-1].spread_after if probes else before
    return {"gpu": gpu, "cells": known, "plan": plan, "spread_before": before, "spread_after": after}


def light_runs(shapes: Sequence[Shape]) -> int:
    """B + N + G: each batch once, and each placement beyond the first once."""
    return len({shape.batch for shape in shapes}) + len({shape.placement for shape in shapes}) - 1


def _shapes(asked: Asked, nodes: NodeCapacity) -> tuple[str, list[Shape]]:
    """On the kind of GPU of which the cell has most, among those on which any of them fits."""
    for gpu, sizes in nodes.gpu_nodes(asked.gpu_models):
        if found := [*_packed(asked, sizes)]:
            return gpu, found
    models = f" of {' or '.join(asked.gpu_models)}" if asked.gpu_models else ""
    raise NothingFits(
        f"the cell's nodes hold no gang of {', '.join(map(str, asked.workers))} workers with "
        f"{count(asked.gpus, 'GPU')} each{models}, or a batch of "
        f"{', '.join(map(str, asked.batches))} has fewer samples than workers; give fewer workers or larger "
        "batches"
    )


def _packed(asked: Asked, sizes: Mapping[int, int]) -> list[Shape]:
    found = []
    for workers in sorted(set(asked.workers)):
        placement = densest(asked.gpus, workers, sizes)
        for batch in sorted(set(asked.batches)):
            if placement and batch >= workers:
                each = -(-batch // workers)
                found.append(Shape(workers, batch, placement, cell_of(placement, each, workers)))
    return found


def _model(
    asked: Asked, gpu: str, shapes: Sequence[Shape], runs: Sequence[FinishedRun], prior: Prior
) -> StepModel:
    """Model of the owner's own runs, else of all owners'; of none where no run measured it."""
    samples = [one for one in samples_of(runs) if (one.network, one.gpu) == (asked.model, gpu)]
    tables = tables_of(samples)
    own, shared = (tables.get(name_of(whose, asked.model, gpu)) for whose in (asked.owner, SHARED))
    measured = own if own is not None and own.cells else shared
    if measured is not None and measured.cells:
        return fit(measured, prior, reference_batch(measured))
    local = [shape.cell.local_batch for shape in shapes]
    return fit(table(()), prior, exp((log(min(local)) + log(max(local))) / 2.0))


def _known(model: StepModel, shape: Shape) -> dict[str, Any]:
    """Times are null where nothing was measured on this kind of GPU: then only the prior answers, which does
    not count as known."""
    found = {
        "workers": shape.workers,
        "batch": shape.batch,
        "nodes": len(shape.placement),
        "gpus_per_node": max(shape.placement),
        "step_ms": None,
        "low_ms": None,
        "high_ms": None,
        "runs": 0,
    }
    if not model.table.cells:
        return found
    times = model.steps([shape.cell])
    middle = float(times.log_s[0])
    width = min(MAX_LOG, model.factor(LEVEL) * float(times.spread[0]))
    if shape.cell in model.table.cells:
        found["runs"] = int(model.table.runs[model.table.cells.index(shape.cell)])
    return found | {
        "step_ms": 1_000.0 * exp(middle),
        "low_ms": 1_000.0 * exp(middle - width),
        "high_ms": 1_000.0 * exp(middle + width),
    }


def _spread(model: StepModel, cells: Sequence[Cell]) -> float:
    spread = model.steps(cells).spread
    return sqrt(float((spread**2).mean()))
