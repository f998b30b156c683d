"""A model written down and read again: the same answers, or a refusal."""

from typing import Any

import msgspec
import numpy as np
import pytest

from penstock_services.estimator.core.learning.saved import FORMAT, BadModel, digest_of, from_bytes, to_bytes
from penstock_services.estimator.core.resource_model.measurements import Task
from penstock_services.estimator.core.resource_model.model import Model, train
from tests.support.trainings import measured_runs as cluster


@pytest.fixture(scope="module")
def model() -> Model:
    return train(cluster.runs().pick(np.arange(48)))


@pytest.fixture(scope="module")
def data(model: Model) -> bytes:
    return to_bytes(model)


def test_a_restarted_service_answers_to_the_last_bit_as_before(model: Model, data: bytes) -> None:
    """The estimator is restarted: it reads its model and every estimate, interval and doubt is the same."""
    asked = [*cluster.tasks(), Task("novel", "H100", 3.0), Task("bert", "abacus", card_mib=8_192.0)]
    again = from_bytes(data, digest_of(data), Model).predict(asked)
    for name, predicted in model.predict(asked).items():
        for field in ("value", "low", "high", "known"):
            assert (getattr(predicted, field) == getattr(again[name], field)).all(), (name, field)


def test_a_model_has_one_name(model: Model, data: bytes) -> None:
    """The version is the digest of the bytes: two nodes with the same version have the same model."""
    model.predict(cluster.tasks())
    assert to_bytes(model) == data == to_bytes(from_bytes(data, digest_of(data), Model)), (
        "caches are not saved"
    )
    assert to_bytes(train(cluster.runs().pick(np.arange(40)))) != data


@pytest.mark.parametrize("where", [0.0, 0.0001, 0.01, 0.5, 0.999999])
def test_one_changed_byte_is_refused(data: bytes, where: float) -> None:
    """A disk, or a hand, changed the file: wherever it did, the model is not used."""
    place = int(where * len(data))
    with pytest.raises(BadModel, match="digest does not match"):
        from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], digest_of(data), Model)


@pytest.mark.parametrize("cut", [1, 100, 50_000])
def test_a_model_cut_short_or_with_more_behind_it_is_refused(data: bytes, cut: int) -> None:
    """The disk was full while it was written."""
    for other in (data[:-cut], data + b"\0" * cut):
        with pytest.raises(BadModel, match="digest does not match"):
            from_bytes(other, digest_of(data), Model)


@pytest.mark.parametrize("data", [b"", b"PENSTOCK-MODEL-1\n", b"\x80\x04\x95 a pickle", b"PK\x03\x04 a zip"])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    """An empty file after a full disk; a pickle that would run code if it were loaded; another version's."""
    with pytest.raises(BadModel, match="another version"):
        from_bytes(data, digest_of(data), Model)


def _label(content: Any) -> Any:
    return next(iter(content[1]["labels"].values()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content[1].pop("features"),
        lambda content: content[1].__setitem__("runs", "48"),
        lambda content: _label(content).__setitem__("y", [[3], b"too short"]),
        lambda content: _label(content).__setitem__("y", [[1], np.array([np.nan]).tobytes()]),
        lambda content: _label(content)["covariance"].__setitem__("columns", [0.5]),
        lambda content: content.__setitem__(0, FORMAT + 1),
    ],
)
def test_a_right_digest_over_wrong_content_is_refused_too(data: bytes, change: Any) -> None:
    """Written by another version, or made up by somebody who can compute a digest: refused, nothing is
    run."""
    content = msgspec.msgpack.decode(data)
    change(content)
    body = msgspec.msgpack.encode(content)
    with pytest.raises(BadModel, match="train it again"):
        from_bytes(body, digest_of(body), Model)
