"""Options `--restart-cost` and `--grace`: the cost of stopping a job and starting it again, and the time
limit of a stop."""

from math import ceil
from typing import NamedTuple

from penstock.exits import BadCommand
from penstock.sdk.job_file.units import duration_ms
from penstock.simulator.engine import DEFAULT_GRACE_MS
from penstock.simulator.job_models.measurements.measured_restarts import longest_save_s, measured_costs
from penstock.simulator.job_models.measurements.tables import STAGE_PROFILES, read_start_ups
from penstock.simulator.job_models.restarts import CostOf, RestartCost
from penstock.simulator.traces.files.importing import data_path

NONE, MEASURED = "none", "measured"
MAX_GRACE_S = 600.0  # bound of `JobSpec.grace_ms`: a longer save would always be killed
MAX_S = 86_400.0
NAMES = ("SAVE", "LAUNCH", "INTERVAL")


class Restarts(NamedTuple):
    """Restart costs. `cost_of` None: restarts are free. `longest_save_s`: of all jobs."""

    cost_of: CostOf | None
    longest_save_s: float = 0.0


def restarts_of(text: str) -> Restarts:
    """Parses `none`, `measured`, or SAVE,LAUNCH,INTERVAL. Raises `BadCommand` with the remedy, `BadFile` if
    Muri's table is missing."""
    if text == NONE:
        return Restarts(None)
    if text == MEASURED:
        table = data_path(f"muri/{STAGE_PROFILES}", f"--restart-cost {MEASURED}", "command line")
        return Restarts(measured_costs(read_start_ups(table)), longest_save_s())
    parts = text.split(",")
    if len(parts) != len(NAMES):
        raise BadCommand(
            f"--restart-cost {text}: {NONE}, {MEASURED}, or SAVE,LAUNCH,INTERVAL as in 5s,20s,10m"
        )
    times: list[float] = []
    for name, part, most_s in zip(NAMES, parts, (MAX_GRACE_S, MAX_S, MAX_S), strict=True):
        try:
            value = duration_ms(part.strip()) / 1_000
        except ValueError as error:
            raise BadCommand(f"--restart-cost {text}: {name}: {error}") from error
        if not 0 <= value <= most_s:
            raise BadCommand(f"--restart-cost {text}: {name} is between 0 and {most_s:,.0f} seconds")
        times.append(value)
    save_s, launch_s, interval_s = times
    cost = RestartCost(save_s, launch_s, interval_s)
    return Restarts(lambda job: cost, cost.save_s)


def grace_of(asked_s: float | None, restarts: Restarts) -> int:
    """Grace in milliseconds; by default a job file's default,
    or the longest save if that is longer. Raises `BadCommand`."""
    if asked_s is None:
        return max(DEFAULT_GRACE_MS, ceil(restarts.longest_save_s * 1_000))
    if not 0 <= asked_s <= MAX_GRACE_S:
        raise BadCommand(f"--grace: between 0 and {MAX_GRACE_S:,.0f} seconds")
    return ceil(asked_s * 1_000)
