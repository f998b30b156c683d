"""A model written down and read again: the same answers, or a refusal."""

from hashlib import sha256

import numpy as np
import pytest

from penstock_services.estimator.core.resource_model.measurements import Task
from penstock_services.estimator.core.resource_model.model import Model, train
from penstock_services.estimator.core.resource_model.saved import BadModel, from_bytes, to_bytes, version_of
from tests.support import measured_runs as cluster


@pytest.fixture(scope="module")
def model() -> Model:
    return train(cluster.runs().pick(np.arange(48)))


@pytest.fixture(scope="module")
def data(model: Model) -> bytes:
    return to_bytes(model)


def test_a_restarted_service_answers_to_the_last_bit_as_before(model: Model, data: bytes) -> None:
    """The estimator is restarted: it reads its model and every estimate, interval and doubt is the same."""
    asked = [*cluster.tasks(), Task("novel", "H100", 3.0), Task("bert", "abacus", card_mib=8_192.0)]
    again = from_bytes(data).predict(asked)
    for name, told in model.predict(asked).items():
        for field in ("value", "low", "high", "known"):
            assert (getattr(told, field) == getattr(again[name], field)).all(), (name, field)


def test_a_model_has_one_name(model: Model, data: bytes) -> None:
    """The version is the digest of the bytes: two nodes with the same version have the same model."""
    assert to_bytes(model) == data == to_bytes(from_bytes(data))
    assert len(version_of(data)) == 64
    assert version_of(to_bytes(train(cluster.runs().pick(np.arange(40))))) != version_of(data)


@pytest.mark.parametrize("where", [0.0, 0.0001, 0.01, 0.5, 0.999999])
def test_one_changed_byte_is_refused(data: bytes, where: float) -> None:
    """A disk, or a hand, changed the file: wherever it did, the model is not used."""
    place = int(where * len(data))
    with pytest.raises(BadModel):
        from_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize("data", [b"", b"PENSTOCK-MODEL-1\n", b"\x80\x04\x95 a pickle", b"PK\x03\x04 a zip"])
def test_what_is_no_model_is_refused(data: bytes) -> None:
    """An empty file after a full disk; a pickle that would run code if it were loaded."""
    with pytest.raises(BadModel):
        from_bytes(data)


@pytest.mark.parametrize("cut", [1, 100, 50_000])
def test_a_model_cut_short_or_with_more_behind_it_is_refused(data: bytes, cut: int) -> None:
    """The disk was full while it was written."""
    for other in (data[:-cut], data + b"\0" * cut):
        with pytest.raises(BadModel):
            from_bytes(other)


@pytest.mark.parametrize(
    ("change", "into"),
    [
        (b'"<f8"', b'"|O8"'),
        (b'"usual_fill"', b'"usual_fell"'),
        (b'"runs":48', b'"runs":"8'),
        (b"[7]", b"[9]"),
    ],
)
def test_a_right_digest_over_wrong_content_is_refused_too(data: bytes, change: bytes, into: bytes) -> None:
    """Written by another version, or made up by somebody who can compute a digest: refused, nothing is run."""
    start = data.index(b"{")
    assert change in data[start:]
    rest = data[start:].replace(change, into, 1)
    with pytest.raises(BadModel):
        from_bytes(data[: start - 65] + sha256(rest).hexdigest().encode() + b"\n" + rest)
