"""`python -m tests.faults.random_cells --runs N`: random cells with queues beyond every window, over all
cores.

Nobody may wait beside free resources, at any time or in the end. In every fourth run numbers lie at the ends
of their legal ranges instead, and every reader has to read what the placer writes about them.

Exit codes: 0 every run was sound, 1 one was not (with the command that replays it), 2 bad options, 130
Ctrl-C.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.ledger.check.check import check
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.scheduling.definition import Definition
from penstock.scheduling.liveness import stalled
from penstock_services.placer.core.common import MAX_PLACEMENTS_PER_RECORD
from tests.faults.laboratory.parallel import cores, spread
from tests.faults.laboratory.patching import posing
from tests.support.cluster.random_cell import RandomCell, settings_of

COMMAND = "python -m tests.faults.random_cells"
SOUND, BROKEN, INTERRUPTED = 0, 1, 130
LONG_EVERY = 32
"""Runs of which one has the profile's own windows, and a queue of 500 jobs; the others have smaller ones."""
LONG_JOBS, LONG_ARRIVES = 820, 0.97
"""Some 500 of them wait at once; a third is told that it never fits."""
WINDOWS = (1, 2, 5, 16)
EXTREMES_EVERY = 4
RATES = (0.05, 0.3, 0.6)
"""Of inputs with numbers at an end: many at once hide each other's effects."""
PROFILES = profiles.names()


class Found(NamedTuple):
    """What came of one run."""

    seed: int
    profile: str
    what: str
    """Empty: it was sound."""
    records: int
    longest_queue: int
    window: int
    """Jobs of the queue that one pass may try."""
    extremes: bool


def one(seed: int) -> Found:
    """The run of this seed, of the kind that it is for."""
    turn = seed // len(PROFILES)
    if turn % EXTREMES_EVERY == 0:
        return at_extremes(seed)
    return beyond_windows(seed, whole=turn % LONG_EVERY == 1)


def at_extremes(seed: int, jobs: int = 100) -> Found:
    """Numbers at the ends of their ranges, read by every reader."""
    profile, rng = _drawn(seed)
    settings = PlacerSettings(profile=profile)
    if rng.random() < 0.5:
        settings = settings_of(seed, profile, int(rng.choice(WINDOWS)))
    return _judged(RandomCell(seed, settings, jobs, arrives=0.9, extremes=float(rng.choice(RATES))))


def beyond_windows(seed: int, *, whole: bool = False) -> Found:
    """A queue longer than every window. `whole`: the windows are the profile's own, and 500 jobs wait; else
    they are small."""
    profile, rng = _drawn(seed)
    if whole:
        return _judged(RandomCell(seed, PlacerSettings(profile=profile), LONG_JOBS, arrives=LONG_ARRIVES))
    window = int(rng.choice(WINDOWS))
    with posing(profiles, "definition_of", _with_windows(window)):
        settings = settings_of(seed, profile, window)
        jobs, arrives = int(rng.choice([90, 120, 200])), float(rng.choice([0.8, 0.9, LONG_ARRIVES]))
        return _judged(RandomCell(seed, settings, jobs, arrives=arrives))


def _drawn(seed: int) -> tuple[str, np.random.Generator]:
    """Profile and generator of a run."""
    return PROFILES[seed % len(PROFILES)], np.random.default_rng([seed, 3])


def _with_windows(window: int) -> Callable[[str], Definition]:
    """Profiles that try 4,096 jobs of a queue try so few, too: what lies behind their windows is judged
    alike."""
    definition_of = profiles.definition_of

    def narrowed(name: str) -> Definition:
        found = definition_of(name)
        if "backfill_window" not in found.fixed:
            return found
        most = min(window, int(str(found.fixed["backfill_window"])))
        return found._replace(fixed=MappingProxyType({**found.fixed, "backfill_window": most}))

    return narrowed


def _judged(cell: RandomCell) -> Found:
    what = ""
    try:
        left = cell.run()
        if left and not cell.extremes:
            what = f"{len(left)} jobs wait for ever: {', '.join(left[:5])}"
        elif (found := stalled(cell.state)) is not None:
            what = f"stalled: {found}"
        elif problems := check(cell.state):
            what = "; ".join(problems[:3])
        elif cell.readers is not None:
            cell.readers.agree_with(cell.state)
    except Exception as error:  # noqa: BLE001 - it is the run's verdict
        what = f"{type(error).__name__}: {error}"
    settings = profiles.in_force(cell.state.settings)
    window = settings.backfill_window + MAX_PLACEMENTS_PER_RECORD
    return Found(
        cell.seed, settings.profile, what, cell.head.seq, cell.longest_queue, window, bool(cell.extremes)
    )


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    options = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    options.add_argument("--runs", type=int, default=500, metavar="N", help="number of runs (default 500)")
    options.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default 0)")
    given = options.parse_args(arguments)
    if given.runs < 1 or given.first < 0:
        options.error("--runs is at least 1, --first at least 0")
    found: list[Found] = []
    began_s = time.perf_counter()  # clock: it is shown, and judges nothing
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[broken]} broken"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task, broken = progress.add_task("runs", total=given.runs, broken=0), 0
        try:
            for run in spread(one, range(given.first, given.first + given.runs), cores()):
                found.append(run)
                broken += bool(run.what)
                progress.update(task, advance=1, broken=broken)
                if run.what:
                    progress.console.print(
                        f"BROKEN  {run.profile}: {run.what}\n        {COMMAND} --runs 1 --first {run.seed}",
                        markup=False,
                    )
        except KeyboardInterrupt:
            print("stopped by Ctrl-C", file=sys.stderr)
    print(_report(found, time.perf_counter() - began_s))  # clock: it is shown, and judges nothing
    if len(found) < given.runs:
        return INTERRUPTED
    return BROKEN if broken else SOUND


def _report(found: Sequence[Found], seconds: float) -> str:
    live, ends = [run for run in found if not run.extremes], [run for run in found if run.extremes]
    beyond = sum(run.longest_queue > run.window for run in live)
    lines = [
        f"{len(found)} runs, {sum(run.records for run in found):,} records in {seconds:.0f} s",
        f"queues: {len(live)} runs, {sum(bool(run.what) for run in live)} stalled; in {beyond} of them the "
        f"queue was longer than the window, at most {max((run.longest_queue for run in live), default=0)} "
        "jobs",
        f"ends of ranges, read by every reader: {len(ends)} runs, {sum(bool(run.what) for run in ends)} "
        "poisoned",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
