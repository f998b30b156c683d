"""Import of one network's measurements (Pollux): step times by placement, scaling, and runs to the target."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from scipy.interpolate import LinearNDInterpolator

from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, rows, text_of
from penstock.simulator.job_models.measurements.placement_table import LOCAL_BATCH_LIMIT, Curve, Epoch, Model

MAX_GRADIENT = 1e30
Read = TypeVar("Read")


@cache
def read_model(folder: Path) -> Model:
    """The model with the folder's name, read once per process. Raises `BadFile`."""
    placements: dict[str, list[tuple[float, float, float]]] = {}
    for (key,), point in _points(folder / "placements.csv", ("placement",)):
        placements.setdefault(key, []).append(point)
    scaling: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for (nodes, gpus), point in _points(folder / "scalability.csv", ("num_nodes", "num_replicas")):
        scaling.setdefault((int(nodes), int(gpus)), []).append(point)
    runs = {
        int(path.stem.removeprefix("validation-")): _epochs(path) for path in folder.glob("validation-*.csv")
    }
    if not placements or not runs:
        raise BadFile(str(folder), [Problem(0, "", "no placements.csv or validation-<batch>.csv with data")])
    batches = sorted(runs)
    epochs = [
        Epoch(
            min(runs[batch][index][0] for batch in batches),
            [(float(batch), *runs[batch][index][1:]) for batch in batches],
        )
        for index in range(min(len(run) for run in runs.values()))
    ]
    measured = max(int(point[0]) for curve in placements.values() for point in curve)
    return Model(
        name=folder.name,
        smallest_batch=batches[0],
        largest_batch=batches[-1],
        local_max=LOCAL_BATCH_LIMIT.get(folder.name, measured),
        epochs=epochs,
        placements={key: sorted(curve) for key, curve in placements.items()},
        between=_between(placements, scaling),
    )


def _between(
    placements: Mapping[str, Curve], scaling: Mapping[tuple[int, int], Curve]
) -> Callable[[Sequence[tuple[float, float, float]]], Sequence[Sequence[float]]]:
    """Linear interpolation in the Delaunay triangulation of all points; placements of one shape count as
    their mean."""
    shapes: dict[tuple[float, float, float], list[tuple[float, float]]] = {}
    for key, curve in placements.items():
        for local, step_s, sync_s in curve:
            shape = float(len(key)), float(sum(map(int, key))), local
            shapes.setdefault(shape, []).append((step_s, sync_s))
    points = sorted(shapes)
    values = [(fmean(v[0] for v in shapes[shape]), fmean(v[1] for v in shapes[shape])) for shape in points]
    for (nodes, gpus), curve in scaling.items():
        for local, step_s, sync_s in curve:
            points.append((float(nodes), float(gpus), local))
            values.append((step_s, sync_s))
    found: Callable[[Sequence[tuple[float, float, float]]], Sequence[Sequence[float]]]
    found = LinearNDInterpolator(points, values)
    return found


def _points(path: Path, keys: tuple[str, ...]) -> list[tuple[tuple[str, ...], tuple[float, float, float]]]:
    """(values of the key columns, point of a curve) per row."""

    def read(row: Row) -> tuple[tuple[str, ...], tuple[float, float, float]]:
        point = row.number("local_bsz"), row.number("step_time"), row.number("sync_time")
        return tuple(row.name(key) for key in keys), point

    return read_all(path, {*keys, "local_bsz", "step_time", "sync_time"}, read)


def _epochs(path: Path) -> list[tuple[float, float, float]]:
    """(progress, squared gradient, its variance) at the end of each epoch."""

    def read(row: Row) -> tuple[float, float, float]:
        return (
            row.number("progress"),
            row.number("grad_sqr", most=MAX_GRADIENT),
            row.number("grad_var", most=MAX_GRADIENT),
        )

    return read_all(path, {"progress", "grad_sqr", "grad_var"}, read)


def read_all(path: Path, needed: set[str], read: Callable[[Row], Read]) -> list[Read]:
    """Every row of a table. Raises `BadFile` with all problems."""
    text = text_of(path)
    columns = header_of(path, text)
    problems = [Problem(1, column, "missing") for column in sorted(needed - set(columns))]
    found = [] if problems else [entry for _, entry in rows(text, columns, read, problems)]
    if problems:
        raise BadFile(str(path), problems)
    return found
