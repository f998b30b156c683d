"""All that finished runs teach about speed and duration as one model: trained at once, saved without pickle.

`PENSTOCK-STEPS-1\\n` + SHA-256 of the rest (hex) + `\\n` + JSON. Floats are written so that they read back as they were;
what is read is data, and nothing in it is ever run.
"""

from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import orjson

from penstock_services.estimator.core.eta.curves import Curve, CurveModel, learn_curves
from penstock_services.estimator.core.eta.remaining import Learned, learn_runs, learn_steps
from penstock_services.estimator.core.resource_model.saved import BadModel
from penstock_services.estimator.core.step_time.learn_prior import learn_prior, reference_batch
from penstock_services.estimator.core.step_time.model import MAX_CELLS, StepModel, fit
from penstock_services.estimator.core.step_time.physics import PARAMETERS
from penstock_services.estimator.core.step_time.placements import Cell, Measurement, Table, wrong
from penstock_services.estimator.core.step_time.prior import RESIDUAL, WIDE, Prior

MAGIC = b"PENSTOCK-STEPS-1\n"
DIGEST = 64
MOST_BYTES = 1 << 28
MOST_MODELS = 1_000
OWNERS_APART = (
    0.3  # by hand, while few cells have two owners: they differ in versions, precisions and input sizes
)


class Durations(NamedTuple):
    """`models`: by name, as the owner, the network and the kind of GPU; `prior` for every name that is not among them."""

    prior: Prior
    models: Mapping[str, StepModel]
    eta: Learned
    apart: float = OWNERS_APART
    """Standard deviation of ln step between owners of one network in the same cell."""


def train(
    tables: Mapping[str, Table],
    curves: Sequence[tuple[str, Curve]],
    totals: Sequence[Sequence[float]],
    windows: Sequence[Sequence[float]],
    chance: np.random.Generator,
    *,
    teaching: Collection[str] | None = None,
    prior: Prior | None = None,
    apart: float = OWNERS_APART,
) -> Durations:
    """The same data and generator give the same model, in whatever order the tables come.

    `tables`: step times by name. `curves`: (kind, loss curve) of finished runs. `totals`: iterations of finished runs,
    one sequence per job. `windows`: mean step per window of finished runs, one sequence per run. `teaching`: names of
    the tables that the prior is learned from; None: all. `prior`: one that is known already. Raises `ValueError` for more
    than MOST_MODELS tables or MAX_CELLS cells in one.
    """
    if len(tables) > MOST_MODELS:
        raise ValueError(f"{len(tables)} tables: at most {MOST_MODELS}; give the most recently used ones")
    named = [(name, tables[name]) for name in sorted(tables) if tables[name].cells]
    if prior is None:
        prior = learn_prior([table for name, table in named if teaching is None or name in teaching], chance)
    models = {name: fit(table, prior, reference_batch(table), chance) for name, table in named}
    spread, errors = learn_runs(totals)
    return Durations(
        prior, models, Learned(learn_curves(curves), spread, errors, learn_steps(windows)), apart
    )


def to_bytes(durations: Durations) -> bytes:
    """The same model gives the same bytes."""
    models = {
        name: {
            "cells": [[list(cell.placement), cell.local_batch] for cell in model.table.cells],
            "log_s": model.table.log_s.tolist(),
            "runs": model.table.runs.tolist(),
            "prior": list(model.prior),
            "reference_batch": model.reference_batch,
            "parameters": model.parameters.tolist(),
        }
        for name, model in sorted(durations.models.items())
    }
    eta = durations.eta
    content = {
        "prior": list(durations.prior),
        "models": models,
        "eta": [list(eta.curves), eta.run_spread, eta.run_errors, eta.step_errors],
        "apart": durations.apart,
    }
    rest = orjson.dumps(content)
    return MAGIC + sha256(rest).hexdigest().encode() + b"\n" + rest


def digest_of(data: bytes) -> str:
    """The SHA-256 that names a saved model, hex. Raises `BadModel`."""
    rest = data[len(MAGIC) + DIGEST + 1 :]
    if not data.startswith(MAGIC):
        raise BadModel("not a saved model of step times: it does not begin as one")
    digest = sha256(rest).hexdigest()
    if digest.encode() + b"\n" != data[len(MAGIC) : len(MAGIC) + DIGEST + 1]:
        raise BadModel("the digest does not match: the model was cut short or changed; train it again")
    return digest


def from_bytes(data: bytes) -> Durations:
    """Raises `BadModel` for bytes that `to_bytes` did not write, whole."""
    if len(data) > MOST_BYTES:
        raise BadModel(f"larger than {MOST_BYTES} bytes: no model of ours is")
    digest_of(data)
    rest = data[len(MAGIC) + DIGEST + 1 :]
    try:
        content = orjson.loads(rest)
        curves, spread, run_errors, step_errors = content["eta"]
        weights, errors, foreign, kinds, own = curves
        constant, by_law, by_left = _numbers(weights, 3)
        law = CurveModel(
            (constant, by_law, by_left),
            _numbers(errors),
            _numbers(foreign),
            tuple(map(str, kinds)),
            tuple(_numbers(one) for one in own),
        )
        if len(law.kinds) != len(law.own_errors):
            raise ValueError("not as many kinds as errors of kinds")
        eta = Learned(law, _number(spread), _numbers(run_errors), _numbers(step_errors))
        models = {str(name): _model(told) for name, told in content["models"].items()}
        return Durations(_prior(content["prior"]), models, eta, _number(content["apart"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadModel(f"written by another version of Penstock ({error!r}); train it again") from error


def step_model(durations: Durations, names: Sequence[str], batches: tuple[float, float]) -> StepModel:
    """The model of the first of `names` that has one, else one that knows only the prior, for such local batches."""
    for name in names:
        if name in durations.models:
            return durations.models[name]
    blank = Table((), np.zeros(0), np.zeros(0))
    middle = (batches[0] * batches[1]) ** 0.5
    return StepModel(blank, durations.prior, middle, np.array(durations.prior.mean))


def _model(told: Mapping[str, Any]) -> StepModel:
    cells = tuple(
        Cell(tuple(int(gpus) for gpus in placement), _number(batch)) for placement, batch in told["cells"]
    )
    log_s, runs = _numbers(told["log_s"], len(cells)), _numbers(told["runs"], len(cells))
    parameters = _numbers(told["parameters"], len(PARAMETERS))
    problems = [reason for cell in cells if (reason := wrong(Measurement(cell, 1.0)))]
    if problems or len(cells) > MAX_CELLS or min(runs, default=1.0) < 1.0:
        raise ValueError(f"impossible cells: {problems[:3]}")
    reference = _number(told["reference_batch"])
    if reference <= 0:
        raise ValueError(f"reference batch {reference}")
    table = Table(cells, np.array(log_s, dtype=np.float64), np.array(runs, dtype=np.float64))
    return StepModel(table, _prior(told["prior"]), reference, np.array(parameters))


def _prior(told: Sequence[Any]) -> Prior:
    mean, spread, residual, models = told
    prior = Prior(
        _numbers(mean, len(PARAMETERS)),
        _numbers(spread, len(PARAMETERS)),
        _numbers(residual, len(RESIDUAL)),
        int(models),
    )
    if min(*prior.spread, *prior.residual) <= 0 or len(told) != len(WIDE):
        raise ValueError("a spread or a scale is not above 0")
    return prior


def _numbers(told: Sequence[Any], count: int | None = None) -> tuple[float, ...]:
    if count is not None and len(told) != count:
        raise ValueError(f"{len(told)} numbers instead of {count}")
    return tuple(_number(value) for value in told)


def _number(value: object) -> float:
    if not isinstance(value, int | float) or not isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)
