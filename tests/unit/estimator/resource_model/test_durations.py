"""One model of speed and duration: trained at once, saved, and read back."""

import numpy as np

from penstock_services.estimator.core.eta.curves import Curve
from penstock_services.estimator.core.learning.saved import digest_of, from_bytes, to_bytes
from penstock_services.estimator.core.records.placements import Cell, Measurement, Table, table
from penstock_services.estimator.core.step_time.training import Durations, train
from penstock_services.estimator.core.step_time.training_set import TrainingSet

SHAPES = [(gpus,) * nodes for nodes in (1, 2, 3) for gpus in (1, 2, 4)]
ASKED = [Cell((1,), 64.0), Cell((2, 4), 64 / 6), Cell((1, 2, 3), 64 / 6)]
CELLS = [Cell(shape, batch) for shape in SHAPES for batch in (8.0, 16.0, 32.0)]


def measured(sync_s: float) -> Table:
    return table(
        Measurement(cell, 0.1 + 0.01 * cell.local_batch + (sync_s if sum(cell.placement) > 1 else 0.0))
        for cell in CELLS
    )


def trained(turn: int = 1) -> Durations:
    """A week of history: two networks, curves of one of them, runs that scatter. `turn` -1: in another
    order."""
    tables = {"ada resnet t4": measured(0.2), "ada bert t4": measured(0.5), "bob gpt t4": measured(0.9)}
    steps = np.arange(1.0, 201.0)
    curves = [("resnet", Curve(steps, 1 + power * 4 * steps**-power)) for power in (0.3, 0.5, 0.7, 0.9)]
    totals = [
        (("resnet", "bert", "gpt")[job % 3], [100.0 * job, 110.0 * job, 95.0 * job]) for job in range(1, 20)
    ]
    windows = [[1.0 + 0.01 * run] * 20 for run in range(10)]
    ordered = dict(list(tables.items())[::turn])
    return train(TrainingSet(ordered, ordered, curves, totals, windows), np.random.default_rng(0))


def test_what_is_read_back_answers_bit_for_bit_the_same() -> None:
    """The estimator restarts: its answers to the same jobs must not change by a bit, or replay would
    differ."""
    before = trained()
    body = to_bytes(before)
    after = from_bytes(body, digest_of(body), Durations)
    assert after.prior == before.prior
    assert after.eta == before.eta
    assert to_bytes(after) == to_bytes(before)
    for name, model in before.models.items():
        again = after.models[name]
        for one, other in zip(again.steps(ASKED), model.steps(ASKED), strict=True):
            assert np.array_equal(one, other)
        assert again.factor(0.9) == model.factor(0.9)


def test_the_order_of_the_history_moves_nothing() -> None:
    assert to_bytes(trained(-1)) == to_bytes(trained())


def test_no_history_is_a_model_too() -> None:
    """The first start of a cell."""
    blank = train(TrainingSet({"ada new t4": table([])}, (), [], [], []), np.random.default_rng(0))
    body = to_bytes(blank)
    assert from_bytes(body, digest_of(body), Durations) == blank
    assert not blank.models
