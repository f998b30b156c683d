"""Ledgers of a published trace and of the papers' generated days, on measured data (PENSTOCK_DATA).

Each is one `penstock simulate` of at most 20 s of processor time. Days of generators come through `penstock
traces convert`.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from unittest.mock import patch

from tests.replay.workloads import quietly, simulated
from tests.support.data import DATA_ROOT

DAY_S = 86_400.0
EACH = 4
"""Of CODA's day and cluster: every so many-th job and node, so that each node has the load of the whole."""
MOST_WORKERS = 16
"""GPUs of GENIE's cluster."""


class Run(NamedTuple):
    """A simulation on measured data."""

    trace: Callable[[Path], str]
    """Writes what has to be written into a folder, and returns the trace as `penstock simulate` takes it."""
    options: Sequence[str]
    needs: Sequence[str]
    """Below PENSTOCK_DATA."""

    def missing(self) -> str:
        """What is not there; empty: nothing."""
        lacking = [name for name in self.needs if not (DATA_ROOT / name).exists()]
        return f"{lacking[0]} is not in {DATA_ROOT}; set PENSTOCK_DATA" if lacking else ""

    def ledger(self) -> Sequence[bytes]:
        """All records, in order."""
        with TemporaryDirectory() as folder, patch.dict(os.environ, PENSTOCK_DATA=str(DATA_ROOT)):
            return simulated(self.trace(Path(folder)), self.options)


def runs() -> Mapping[str, Run]:
    """All of them by name."""
    found: dict[str, Run] = {}
    for profile, sources in TRACE3.items():
        for durations in sources:
            options = (*MURI, "--profile", profile, "--durations", durations)
            found[f"trace3/{profile}/{durations}"] = Run(lambda folder: "muri/trace3", options, ("muri",))
    for profile in ("coda", "penstock"):
        run = Run(coda_day, (*CODA, "--profile", profile), ("synergy",))
        found[f"coda-day-each-4th/{profile}"] = run
    for profile in ("genie", "penstock"):
        run = Run(genie_day, (*GENIE, "--profile", profile), ("pollux",))
        found[f"genie-20-per-hour/{profile}"] = run
    return found


READ = ("known", "learned", "unknown")
TRACE3: Mapping[str, Sequence[str]] = {
    "srtf": READ,
    "srsf": READ,
    "tiresias": ("known",),
    "muri-s": READ,
    "muri-l": ("known",),
    "penstock": READ,
}
"""Profile → sources of run times; one is enough where no decision depends on them."""
MURI = ("--cluster", "8x8", "--truth", "muri")
CODA = (
    *("--cluster", "20x5x28", "--truth", "bandwidth(cpu)"),
    *("--restart-cost", "2.5s,20s,10m", "--durations", "unknown"),
)
GENIE = ("--cluster", "4x4@T4", "--truth", "step-times", "--durations", "learned")


def coda_day(folder: Path) -> str:
    """The first day of `coda/3-days`, with what ran before."""
    day = [row for row in rows_of("coda/3-days", folder) if float(row["submit_s"]) < DAY_S]
    return written(day[::EACH], folder)


def genie_day(folder: Path) -> str:
    """A day of `genie/20-per-hour`. As in the source, a task may have a GPU for each sample of a batch."""
    tasks = rows_of("genie/20-per-hour", folder)
    for task in tasks:
        task["gpus"] = task["workers"] = str(min(MOST_WORKERS, int(task["batch_size"])))
        task["min_workers"] = "1"
    return written(tasks, folder)


def rows_of(generator: str, folder: Path) -> list[dict[str, str]]:
    """The generator's jobs under seed 0, as lines of Penstock's CSV."""
    path = folder / "generated.csv"
    quietly("traces", "convert", generator, "--seed", "0", "-o", str(path))
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def written(rows: Sequence[Mapping[str, str]], folder: Path) -> str:
    """The path of a trace with these lines."""
    path = folder / "trace.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0].keys())
        table.writeheader()
        table.writerows(rows)
    return str(path)
