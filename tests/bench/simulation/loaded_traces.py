"""The simulator on Muri's loaded traces, where groups are planned at each event: `python -m
tests.bench.simulation.loaded_traces [TRACE ...] [--jobs N] [--profile PROFILE ...]`.

A loaded trace has more work than its 64 GPUs: dozens of jobs wait, so each arrival and each end leads to a
plan, and a plan stops and starts jobs. Events are arrivals and completions, seconds those of the processor.
Beside them how many times as long an event takes as under SRSF on the same jobs in the same process: that
ratio hardly depends on the machine. Each line says whether the aim is met; none of them fails. The hash of
the ledger shows whether two versions decided the same. Needs the data sets (`PENSTOCK_DATA`).
"""

import argparse
import gc
import sys
from time import process_time
from typing import NamedTuple

from penstock.model.nouns.settings import PlacerSettings
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.catalogue import work_for
from penstock.simulator.meter import Figures
from penstock.simulator.runs import no_collection
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.files.importing import read_trace
from penstock.simulator.traces.fitting import ClusterCapacity
from tests.papers.muri.test_muri_baselines import DATA

TRACES = ("trace1", "trace2", "trace4", "trace1_pr")
YARDSTICK = "srsf"
AIMS = {"penstock": 500, "interleave": 500, "muri-s": 100, "muri-l": 100}
"""Profile → least events/s: 100 where groups come by the published algorithm, 500 by default."""
CLUSTER = "8x8"
JOBS = 300


class Run(NamedTuple):
    """One whole run."""

    figures: Figures
    us_per_event: float


def run(trace: str, profile: str, jobs: int | None) -> Run:
    """The first `jobs` of the trace; None: all of them."""
    path = DATA / "trace-data" / f"{trace}.csv"
    settings = PlacerSettings(profile=profile)
    read = read_trace(path, fits=ClusterCapacity(nodes_of(CLUSTER)).problems)
    work = work_for("muri", read, path, settings)
    simulation = Simulation(nodes_of(CLUSTER), settings, work, read.jobs[:jobs])
    gc.collect()
    with no_collection():
        began = process_time()
        while simulation.step():
            pass
        seconds = process_time() - began
    found = simulation.figures(0, seconds)
    assert not found.unfinished_jobs, (trace, profile)
    return Run(found, seconds / found.events * 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.simulation.loaded_traces", description=__doc__
    )
    parser.add_argument("traces", nargs="*", default=TRACES, metavar="TRACE")
    parser.add_argument(
        "--jobs", type=int, default=JOBS, help=f"the first of each trace (default {JOBS}); 0: all"
    )
    parser.add_argument("--profile", nargs="+", default=tuple(AIMS))
    asked = parser.parse_args()
    if not DATA.exists():
        print(
            "Muri's traces are not there; set PENSTOCK_DATA to the folder of the data sets", file=sys.stderr
        )
        return 2
    for trace in asked.traces:
        alone = run(trace, YARDSTICK, asked.jobs or None).us_per_event
        for profile in asked.profile:
            found = run(trace, profile, asked.jobs or None)
            figures, aim = found.figures, AIMS.get(profile)
            reached = (
                "" if aim is None else f" (aim {aim}: {'met' if figures.events_per_s >= aim else 'not met'})"
            )
            print(
                f"{trace:<10} {profile:<11} {figures.events_per_s:>6,.0f} events/s{reached}, "
                f"{found.us_per_event / alone:>5.1f} times as long as {YARDSTICK};"
                f" per event {figures.records / figures.events:.1f} records, "
                f"{figures.preemptions / figures.events:.1f} stops;"
                f" mean JCT {figures.avg_jct_s:,.1f} s, ledger {figures.ledger_hash[:16]}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
