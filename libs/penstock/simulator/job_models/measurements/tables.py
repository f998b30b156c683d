"""CSV import of the measured tables behind job models.
Each problem of a file is reported with line and column."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

from penstock.runtime.files.csv_import import BadFile, Problem, Row, header_of, text_of
from penstock.simulator.job_models.measurements.colocation import Config, Throughputs
from penstock.simulator.job_models.measurements.convergence import LossCurve
from penstock.simulator.job_models.measurements.cores import Sensitivity
from penstock.simulator.job_models.measurements.measured import read_all

ISOLATED, COLOCATED = "gavel_isolated_throughput.csv", "gavel_colocated_throughput.csv"
STAGE_PROFILES = "stage_profiles.csv"
SENSITIVITY = "cpu_mem_sensitivity.csv"
SOURCE_RATIO = "models"
"""Synergy's table has four versions, relative to 3, 4, 5 and 6 cores per GPU; this is the first."""
CHARRNN = "charrnn_*_error.csv"
EPOCHS_TO_TARGET = "summary_train.csv"
RISES = frozenset({"bert", "cifar10", "imagenet", "ncf"})
"""Pollux's models whose metric is better when it is larger; of the others the error was measured."""
FALLS_IN_ZEUS = frozenset({"librispeech"})
"""Zeus's data sets whose metric is an error."""

Points = Sequence[tuple[float, float]]


def read_throughputs(folder: Path) -> Throughputs:
    """Gavel's two tables. A figure of 0 means that the configuration did not run: it counts as not measured.
    Raises `BadFile`."""
    isolated = read_all(
        folder / ISOLATED,
        {"gpu", "consolidated", "model", "batch_size", "num_gpus", "steps_per_s"},
        _isolated,
    )
    pairs = read_all(
        folder / COLOCATED,
        {"gpu", "model_a", "batch_a", "ngpu_a", "model_b", "batch_b", "ngpu_b", "tput_a"},
        _pair,
    )
    return Throughputs(
        consolidated={config: rate for together, config, rate in isolated if together and rate > 0},
        spread={config: rate for together, config, rate in isolated if not together and rate > 0},
        pairs={(one, other): rate for one, other, rate in pairs if rate > 0},
    )


def _isolated(row: Row) -> tuple[int, Config, float]:
    config = _config(row, "model", "batch_size", "num_gpus")
    return row.whole("consolidated", most=1), config, row.number("steps_per_s")


def _pair(row: Row) -> tuple[Config, Config, float]:
    """One half of a pair; the other half is in a line of its own."""
    one, other = (_config(row, f"model_{side}", f"batch_{side}", f"ngpu_{side}") for side in "ab")
    return one, other, row.number("tput_a")


def _config(row: Row, model: str, batch: str, gpus: str) -> Config:
    batch_size = row.whole(batch, least=1) if row.has(batch) else None
    return Config(row.name("gpu").lower(), row.name(model), batch_size, row.whole(gpus, least=1))


@cache
def read_sensitivity(path: Path) -> Sensitivity:
    """Synergy's table, read once per process. A figure of 0 was not measured. Raises `BadFile`."""
    needed = {"cpu_gpu_ratio_dir", "model", "num_gpu", "cpus", "mem_gb", "relative_tput"}
    found: dict[tuple[str, int], dict[float, list[tuple[float, float]]]] = {}
    for ratio, model, gpus, cores, memory_gb, relative in read_all(path, needed, _sensitivity):
        if ratio == SOURCE_RATIO and relative > 0 and not model.startswith("__"):
            found.setdefault((model, gpus), {}).setdefault(cores, []).append((memory_gb, relative))
    if not any(gpus == 1 for _, gpus in found):
        raise BadFile(
            str(path), [Problem(0, "", f"no row with cpu_gpu_ratio_dir {SOURCE_RATIO} and one GPU")]
        )
    return MappingProxyType(
        {
            measured: sorted((cores, sorted(curve)) for cores, curve in rows.items())
            for measured, rows in sorted(found.items())
        }
    )


def read_start_ups(path: Path) -> dict[tuple[str, int], float]:
    """Muri's table: (model, GPUs) → seconds of a start. Raises `BadFile`."""

    def read(row: Row) -> tuple[tuple[str, int], float]:
        return (row.name("model"), row.whole("num_gpu", least=1)), row.number("startup_overhead_s")

    return dict(read_all(path, {"model", "num_gpu", "startup_overhead_s"}, read))


def _sensitivity(row: Row) -> tuple[str, str, int, float, float, float]:
    return (
        row.name("cpu_gpu_ratio_dir"),
        row.text("model"),
        row.whole("num_gpu", least=1),
        row.number("cpus", above=0),
        row.number("mem_gb", above=0),
        row.number("relative_tput"),
    )


@cache
def read_curves(root: Path) -> Mapping[str, LossCurve]:
    """All curves below the data, by name, in order of name, read once per process. Raises `BadFile`."""
    found = dict(read_charrnn(root / "charrnn"))
    for path in sorted((root / "pollux/traces").glob("*/validation-*.csv")):
        name = f"pollux/{path.parent.name}-{path.stem.removeprefix('validation-')}"
        found[name] = LossCurve(_validation(path))
    targets = root / "zeus" / EPOCHS_TO_TARGET
    if targets.is_file():
        found.update(_zeus(targets))
    return MappingProxyType(dict(sorted(found.items())))


@cache
def read_charrnn(folder: Path) -> Mapping[str, LossCurve]:
    """A curve per column, read once per process. Raises `BadFile`."""
    return MappingProxyType(
        {
            f"charrnn/{name}": LossCurve(_even(losses))
            for path in sorted(folder.glob(CHARRNN))
            for name, losses in _columns(path).items()
        }
    )


def _columns(path: Path) -> Mapping[str, Sequence[float]]:
    names = header_of(path, text_of(path))
    rows = read_all(path, set(names), lambda row: [row.number(name) for name in names])
    return {name: [row[column] for row in rows] for column, name in enumerate(names)}


def _even(losses: Sequence[float]) -> Points:
    """Points at equal numbers of iterations, from the start to the end."""
    last = max(1, len(losses) - 1)
    return [(index / last, loss) for index, loss in enumerate(losses)]


def _validation(path: Path) -> Points:
    """A point per epoch; the run starts before the first of them, at a loss that was not measured."""
    rows = read_all(path, {"progress", "metric"}, lambda row: (row.number("progress"), row.number("metric")))
    sign = -1 if path.parent.name in RISES else 1
    return _from_zero([(progress, sign * metric) for progress, metric in rows])


def _zeus(path: Path) -> Mapping[str, LossCurve]:
    needed = {"dataset", "network", "batch_size", "target_metric", "target_epoch"}
    epochs: dict[str, dict[float, list[int]]] = {}
    for name, data_set, target, epoch in read_all(path, needed, _target):
        if epoch is None:
            continue
        sign = 1 if data_set in FALLS_IN_ZEUS else -1
        epochs.setdefault(name, {}).setdefault(sign * target, []).append(epoch)
    return {
        name: LossCurve(_from_zero(_rising([(fmean(seeds), loss) for loss, seeds in targets.items()])))
        for name, targets in epochs.items()
        if len(targets) > 1
    }


def _target(row: Row) -> tuple[str, str, float, int | None]:
    """Data set, network, batch and epochs of a run; `nan`: this seed never met the target."""
    data_set = row.name("dataset")
    name = f"zeus/{data_set}-{row.name('network')}-{row.whole('batch_size', least=1)}"
    epoch = None if row.text("target_epoch") == "nan" else row.whole("target_epoch")
    return name, data_set, row.number("target_metric"), epoch


def _rising(points: Iterable[tuple[float, float]]) -> Points:
    """Points by epoch; where few seeds met a harder target, its mean may lie before an easier one's: the
    later counts."""
    latest = 0.0
    found: list[tuple[float, float]] = []
    for epoch, loss in sorted(points, key=lambda point: -point[1]):
        latest = max(latest, epoch)
        found.append((latest, loss))
    return found


def _from_zero(points: Points) -> Points:
    """Points scaled to progress from 0 to 1; before the first point its value holds."""
    last = max(points[-1][0], 1e-9)
    return [(0.0, points[0][1]), *((at / last, loss) for at, loss in points)]
