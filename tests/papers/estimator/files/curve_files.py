"""Loss curves of finished runs, and how many epochs runs of one job took, from the folders of the data
sets."""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock_services.estimator.core.eta.curves import Curve, curve

FEWEST_POINTS = 10
FEWEST_EPOCHS = 8  # with fewer, one epoch more or less is most of the error
FEWEST_RUNS = 3  # of a job: one is asked about, the others teach
KIND = ("dataset", "network")
JOB = (*KIND, "batch_size", "optimizer", "learning_rate", "target_metric")


def holds_curves(path: Path) -> bool:
    """Whether it is a folder with a folder of loss curves or of epochs to a target."""
    return any((path / name).exists() for name in ("charrnn", "pollux/traces", "zeus/summary_train.csv"))


def read_curves(path: Path) -> list[tuple[str, Curve]]:
    """(kind, curve) of every run with FEWEST_POINTS or more: of char-rnn, and validation curves of Pollux'
    models."""
    found: list[tuple[str, Curve]] = []
    for file in sorted((path / "charrnn").glob("*_error.csv")):
        with file.open() as lines:
            rows = list(csv.reader(lines))
        for column in range(len(rows[0])):
            values = [float(row[column]) for row in rows[1:] if row[column]]
            found.append(("char-rnn", curve(range(1, len(values) + 1), values)))
    for file in sorted((path / "pollux/traces").glob("*/validation-*.csv")):
        with file.open() as lines:
            values = [float(row["metric"]) for row in csv.DictReader(lines)]
        if len(values) >= FEWEST_POINTS:
            found.append((file.parent.name, curve(range(1, len(values) + 1), values)))
    return found


def read_totals(path: Path) -> Mapping[tuple[str, ...], Sequence[float]]:
    """Job (the values of JOB) → epochs of each of its runs until the target, of Zeus; jobs in order."""
    jobs: dict[tuple[str, ...], list[float]] = defaultdict(list)
    file = path / "zeus/summary_train.csv"
    if file.is_file():
        with file.open() as lines:
            for row in csv.DictReader(lines):
                if row["target_epoch"] != "nan" and float(row["target_epoch"]) >= FEWEST_EPOCHS:
                    jobs[tuple(row[name] for name in JOB)].append(float(row["target_epoch"]))
    return {job: totals for job, totals in sorted(jobs.items()) if len(totals) >= FEWEST_RUNS}


def kind_of(job: tuple[str, ...]) -> str:
    """What makes its runs scatter as others': data set and network."""
    return "/".join(job[: len(KIND)])
