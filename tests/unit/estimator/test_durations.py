"""One model of speed and duration: trained at once, saved, read back, and refused when it was touched."""

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import orjson
import pytest

from penstock_services.estimator.core.eta.curves import Curve
from penstock_services.estimator.core.resource_model.saved import BadModel
from penstock_services.estimator.core.step_time.durations import (
    DIGEST,
    MAGIC,
    Durations,
    from_bytes,
    step_model,
    to_bytes,
    train,
)
from penstock_services.estimator.core.step_time.placements import Cell, Measurement, Table, table

SHAPES = [(gpus,) * nodes for nodes in (1, 2, 3) for gpus in (1, 2, 4)]
ASKED = [Cell((1,), 64.0), Cell((2, 4), 64 / 6), Cell((1, 2, 3), 64 / 6)]
CELLS = [Cell(shape, batch) for shape in SHAPES for batch in (8.0, 16.0, 32.0)]


def measured(sync_s: float) -> Table:
    return table(
        Measurement(cell, 0.1 + 0.01 * cell.local_batch + (sync_s if sum(cell.placement) > 1 else 0.0))
        for cell in CELLS
    )[0]


def trained(turn: int = 1) -> Durations:
    """A week of history: two networks, curves of one of them, runs that scatter. `turn` -1: in another order."""
    tables = {"ada resnet t4": measured(0.2), "ada bert t4": measured(0.5), "bob gpt t4": measured(0.9)}
    steps = np.arange(1.0, 201.0)
    curves = [("resnet", Curve(steps, 1 + power * 4 * steps**-power)) for power in (0.3, 0.5, 0.7, 0.9)]
    totals = [[100.0 * job, 110.0 * job, 95.0 * job] for job in range(1, 20)]
    windows = [[1.0 + 0.01 * run] * 20 for run in range(10)]
    ordered = dict(list(tables.items())[::turn])
    return train(ordered, curves, totals, windows, np.random.default_rng(0))


def test_what_is_read_back_answers_bit_for_bit_the_same() -> None:
    """The estimator restarts: its answers to the same jobs must not change by a bit, or replay would differ."""
    before = trained()
    after = from_bytes(to_bytes(before))
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


def test_an_unknown_network_is_told_by_the_prior() -> None:
    """Ada's own model first, then what others measured of the network, else what all networks have in common."""
    durations = trained()
    own = step_model(durations, ["ada bert t4", "bert t4"], (8, 32))
    assert own is durations.models["ada bert t4"]
    blank = step_model(durations, ["ada vgg t4", "vgg t4"], (8, 32))
    known, guessed = (model.factor(0.9) * model.steps([Cell((2, 2), 16)]).spread[0] for model in (own, blank))
    assert guessed > known + np.log(10) / 2


def test_no_history_is_a_model_too() -> None:
    """The first start of a cell."""
    blank = train({"ada new t4": table([])[0]}, [], [], [], np.random.default_rng(0))
    assert from_bytes(to_bytes(blank)) == blank
    assert not blank.models


def test_a_touched_file_is_refused() -> None:
    """One bit flipped on the disk; a file cut short; another file altogether."""
    whole = to_bytes(trained())
    touched = bytearray(whole)
    touched[-100] ^= 1
    for broken in (bytes(touched), whole[:-1], whole[: len(MAGIC) + 10]):
        with pytest.raises(BadModel, match="digest does not match"):
            from_bytes(broken)
    with pytest.raises(BadModel, match="does not begin as one"):
        from_bytes(b"\x80\x04" + whole)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("eta"),
        lambda content: content["prior"].pop(),
        lambda content: content["prior"][2].__setitem__(0, -1.0),
        lambda content: content["models"]["ada bert t4"]["cells"].pop(),
        lambda content: content["models"]["ada bert t4"]["cells"].__setitem__(0, [[0], 8.0]),
        lambda content: content["models"]["ada bert t4"].__setitem__("reference_batch", 0),
        lambda content: content["models"]["ada bert t4"]["parameters"].__setitem__(0, None),
        lambda content: content["models"]["ada bert t4"]["runs"].__setitem__(0, 0.0),
        lambda content: content["models"].__setitem__("ada bert t4", 7),
        lambda content: content["eta"][0][3].append("one more kind"),
    ],
)
def test_a_sealed_file_of_another_kind_is_refused(change: Callable[[dict[str, object]], object]) -> None:
    """Another version of Penstock wrote it, with a digest that is right."""
    content = orjson.loads(to_bytes(trained())[len(MAGIC) + DIGEST + 1 :])
    change(content)
    rest = orjson.dumps(content)
    with pytest.raises(BadModel, match="another version of Penstock"):
        from_bytes(MAGIC + sha256(rest).hexdigest().encode() + b"\n" + rest)


def test_too_many_tables_are_refused() -> None:
    one = measured(0.2)
    with pytest.raises(ValueError, match="at most 1000"):
        train({str(place): one for place in range(1_001)}, [], [], [], np.random.default_rng(0))
