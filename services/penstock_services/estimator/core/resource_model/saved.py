"""A model as bytes and back, without pickle: arrays and names only, under the digest of all of it.

`PENSTOCK-MODEL-1\\n` + SHA-256 of the rest (hex) + `\\n` + JSON header + `\\n` + arrays, little-endian, one after the other.
The header names each array with its type and shape. What is read is data: nothing in it is ever run.
"""

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from penstock_services.estimator.core.resource_model.covariance import RATES, Weights
from penstock_services.estimator.core.resource_model.features import WIDTH, Design, Inputs
from penstock_services.estimator.core.resource_model.gaussian_process import Process
from penstock_services.estimator.core.resource_model.labels import UNITS
from penstock_services.estimator.core.resource_model.model import Learned, Model, Spread, Spreads

MAGIC = b"PENSTOCK-MODEL-1\n"
DIGEST = 64
MOST_BYTES = 1 << 28
TYPES = {"<f8": np.float64, "<f4": np.float32, "<i8": np.int64}

Arrays = dict[str, NDArray[Any]]


class BadModel(ValueError):
    """These bytes are no model of ours, or no longer the one that was written."""


def version_of(data: bytes) -> str:
    """The SHA-256 that names a saved model, hex. Raises `BadModel`."""
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + DIGEST + 1:
        raise BadModel("not a saved model: it does not begin as one")
    told = data[len(MAGIC) : len(MAGIC) + DIGEST]
    if sha256(data[len(MAGIC) + DIGEST + 1 :]).hexdigest().encode() != told:
        raise BadModel("the digest does not match: the model was cut short or changed; train it again")
    return told.decode()


def to_bytes(model: Model) -> bytes:
    """The same model gives the same bytes."""
    arrays: Arrays = {"mean": model.design.mean, "scale": model.design.scale}
    labels = {}
    for name, learned in model.labels.items():
        process = learned.process
        found: Arrays = {
            "weights": process.weights.values,
            "alpha": process.alpha,
            "known": process.known,
            "width": learned.width,
        }
        found |= {field: getattr(process.centres, field) for field in Inputs.__slots__}
        arrays |= {f"{name}/{field}": value for field, value in found.items()}
        spreads = [list(spread) for spread in learned.spreads]
        labels[name] = {"mean": learned.mean, "scale": learned.scale, "spreads": spreads}
    kept = {name: _plain(array) for name, array in arrays.items()}
    header = {
        "runs": model.runs,
        "workloads": list(model.design.workloads),
        "gpus": list(model.design.gpus),
        "lines": [[*key, *line] for key, line in model.design.lines.items()],
        "batches": [[*key, value] for key, value in model.design.batches.items()],
        "usual_fill": model.design.usual_fill,
        "line_share": model.design.line_share,
        "labels": labels,
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in kept.items()],
    }
    rest = orjson.dumps(header) + b"\n" + b"".join(array.tobytes() for array in kept.values())
    return MAGIC + sha256(rest).hexdigest().encode() + b"\n" + rest


def from_bytes(data: bytes) -> Model:
    """Raises `BadModel` for bytes that `to_bytes` did not write, whole."""
    if len(data) > MOST_BYTES:
        raise BadModel(f"larger than {MOST_BYTES} bytes: no model of ours is")
    version_of(data)
    head, _, body = data[len(MAGIC) + DIGEST + 1 :].partition(b"\n")
    try:
        header = orjson.loads(head)
        return _model(header, _arrays(header["arrays"], body))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadModel(f"written by another version of Penstock ({error!r}); train it again") from error


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    wanted = np.dtype(array.dtype).newbyteorder("<")
    return np.ascontiguousarray(array, dtype=wanted)


def _arrays(told: list[list[Any]], body: bytes) -> Arrays:
    arrays, at = {}, 0
    for name, kind, shape in told:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(body, TYPES[kind], count, at).reshape(shape)
        at += arrays[name].nbytes
    if at != len(body):
        raise ValueError("bytes are left over")
    return arrays


def _model(header: Mapping[str, Any], arrays: Arrays) -> Model:
    design = Design(
        workloads={name: index for index, name in enumerate(header["workloads"])},
        gpus={name: index for index, name in enumerate(header["gpus"])},
        lines={(name, half): (a, b, c) for name, half, a, b, c in header["lines"]},
        batches={(name, half): value for name, half, value in header["batches"]},
        usual_fill=header["usual_fill"],
        mean=arrays["mean"],
        scale=arrays["scale"],
        line_share=header["line_share"],
    )
    if design.mean.shape != (WIDTH,) or design.scale.shape != (WIDTH,):
        raise ValueError("another set of columns")
    labels = {
        name: _learned(name, told, arrays, len(design.workloads)) for name, told in header["labels"].items()
    }
    return Model(design, labels, header["runs"])


def _learned(name: str, told: Mapping[str, Any], arrays: Arrays, workloads: int) -> Learned:
    columns = UNITS[name].columns
    weights = Weights(arrays[f"{name}/weights"], columns)
    if len(weights.values) != RATES + 2 * len(columns) + 1:
        raise ValueError(f"{name}: another set of columns")
    found = {field: arrays[f"{name}/{field}"] for field in (*Inputs.__slots__, "alpha", "known", "width")}
    count = len(found["alpha"])
    shapes = {"columns": (count, WIDTH), "known": (len(found["known"]), count), "width": (workloads,)}
    for field, array in found.items():
        if array.shape != shapes.get(field, (count,)) or not np.isfinite(array).all():
            raise ValueError(f"{name}: {field} is not as it is written")
    centres = Inputs(*(found[field] for field in Inputs.__slots__))
    process = Process(weights, centres, found["alpha"], found["known"])
    spreads = Spreads(*(Spread(*spread) for spread in told["spreads"]))
    return Learned(process, told["mean"], told["scale"], found["width"], spreads)
