"""Serialisation of learned models without pickle: MessagePack of numbers, names and arrays, checked against a
SHA-256.

The digest is stored beside the bytes, in the model's row, and names the version. The content is data: none of
it is executed.
"""

from hashlib import sha256
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

FORMAT = 3  # rises when the fields of a saved model change their meaning
MAX_BYTES = 1 << 28  # a value of Postgres holds four times as many
VERSION_DIGITS = 12  # of the digest, in a version

Saved = TypeVar("Saved")


class BadModel(ValueError):
    """These bytes are not a model that this version wrote, or do not match the digest."""


class _Array(msgspec.Struct, array_like=True):
    shape: tuple[int, ...]
    values: bytes


def to_bytes(model: object) -> bytes:
    """The same model gives the same bytes.
    Dataclasses, named tuples, mappings, tuples, arrays, numbers, text."""
    return msgspec.msgpack.encode((FORMAT, model), enc_hook=_plain)


def digest_of(body: bytes) -> str:
    """SHA-256, hex."""
    return sha256(body).hexdigest()


def version_of(kind: str, digest: str) -> str:
    """The model's name in estimates and events."""
    return f"{kind}-{digest[:VERSION_DIGITS]}"


def from_bytes(body: bytes, digest: str, kind: type[Saved]) -> Saved:
    """The model of `kind` that `to_bytes` wrote.
    Raises `BadModel`, also for a whole model of another digest."""
    if len(body) > MAX_BYTES:
        raise BadModel(f"larger than {MAX_BYTES} bytes, the maximum of a model")
    if digest_of(body) != digest:
        raise BadModel(
            "the digest does not match: the model was cut short or changed, or is another one; train it again"
        )
    try:
        written, model = msgspec.msgpack.decode(
            body,
            type=tuple[int, kind],  # type: ignore[valid-type]
            dec_hook=_array,
        )
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise BadModel(f"written by another version of Penstock ({error}); train it again") from error
    if written != FORMAT:
        raise BadModel(f"written in format {written}, this version reads {FORMAT}; train it again")
    return model


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return _Array(value.shape, np.ascontiguousarray(value, value.dtype.newbyteorder("<")).tobytes())
    raise NotImplementedError(f"{type(value)} cannot be saved")


def _array(kind: Any, value: Any) -> Any:
    """`kind`: an array type such as `NDArray[np.float64]`."""
    found = msgspec.convert(value, _Array)
    dtype = np.dtype(get_args(get_args(kind)[1])[0]).newbyteorder("<")
    array = np.frombuffer(found.values, dtype).reshape(found.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("an array holds a value that is not a number")
    return array
