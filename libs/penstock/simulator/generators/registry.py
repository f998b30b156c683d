"""Registry of generators by name. A trace may be one of these as well as a file."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from penstock.runtime.files.csv_import import BadFile, Problem
from penstock.simulator.generators.base import Generator
from penstock.simulator.generators.coda import coda
from penstock.simulator.generators.coda_month import coda_month
from penstock.simulator.generators.genie import RATES, genie
from penstock.simulator.generators.liquid import NODES, batch, immediate
from penstock.simulator.generators.muri_mix import muri_mix
from penstock.simulator.generators.poisson import poisson
from penstock.simulator.generators.specon import SCHEDULES, specon
from penstock.simulator.generators.summary import generator_from, read_sums
from penstock.simulator.traces.files.importing import DATA_VARIABLE, SUMMARIES, Fits, Trace, data_root

FORMAT = "generated"
POISSON = re.compile(r"poisson/([1-9][0-9]{0,3})-per-hour")
MURI_MIX = re.compile(r"muri-mix/(100|[1-9]?[0-9])-percent-1-gpu-load-([1-9][0-9]{0,2})")

GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {f"liquid/batch-{nodes}": batch(nodes) for nodes in NODES}
    | {"liquid/immediate": immediate()}
    | {f"genie/{per_hour}-per-hour": genie(per_hour) for per_hour in RATES}
    | {f"specon/{name}": specon(name) for name in SCHEDULES}
    | {"coda/default": coda(), "coda/month": coda_month(30), "coda/3-days": coda_month(3)}
    | {f"muri-mix/{share}-percent-1-gpu-load-100": muri_mix(share, 100) for share in (0, 50, 100)}
    | {f"poisson/{per_hour}-per-hour": poisson(per_hour) for per_hour in (10, 60)}
)
"""Generators that need no data set's sums; most need measured tables. Other rates of `poisson/…-per-hour`,
shares and loads of `muri-mix/…` exist too."""
HELIOS = "helios"


def of_summaries() -> Mapping[str, Generator]:
    """Generators of jobs with the sums of the data sets that are here. Raises `BadFile` for a broken one."""
    root = data_root()
    if root is None or not (root / SUMMARIES[HELIOS]).is_file():
        return {}
    path = root / SUMMARIES[HELIOS]
    return {f"{HELIOS}/{sums.cluster}": generator_from(sums, path) for sums in read_sums(path)}


def generator_of(name: str) -> Generator | None:
    """The generator of this name; None: no generator has it. Raises `BadFile` for one whose data set is not
    here."""
    if name.startswith(f"{HELIOS}/"):
        there = of_summaries()
        if name not in there:
            message = (
                f"there are {', '.join(there)}" if there else f"{SUMMARIES[HELIOS]} is not in {DATA_VARIABLE}"
            )
            raise BadFile(name, [Problem(0, "", f"no such cluster; {message}")])
        return there[name]
    found = GENERATORS.get(name)
    if found is None and (match := POISSON.fullmatch(name)) is not None:
        return poisson(int(match[1]))
    if found is None and (match := MURI_MIX.fullmatch(name)) is not None:
        return muri_mix(int(match[1]), int(match[2]))
    return found


def generate(name: str, generator: Generator, seed: int, fits: Fits | None = None) -> Trace:
    """A generator's jobs under a seed, as a trace. Raises `BadFile` with all jobs in which `fits` finds a
    problem."""
    jobs = generator.make(seed)
    problems = [
        Problem(0, field, f"job {job.job_id}: {message}")
        for job in jobs
        for field, message in (fits(job) if fits is not None else ())
    ]
    if problems:
        raise BadFile(name, problems)
    return Trace(name, FORMAT, jobs, ())
