"""Registry of generators by name: the product's own, and those that installed packages add. A trace may be
one of these as well as a file."""

from collections.abc import Mapping

from penstock.entry_points import Group
from penstock.runtime.files.csv_import import BadFile, Problem
from penstock.simulator.generators.base import Family, Generator
from penstock.simulator.generators.poisson import POISSON
from penstock.simulator.generators.summary import generator_from, read_sums
from penstock.simulator.traces.files.importing import DATA_VARIABLE, SUMMARIES, Fits, Trace, data_root

FORMAT = "generated"
EXAMPLE = "poisson/10-per-hour"
INSTALLED: Group[Family] = Group("penstock.generators")
"""First part of a name → the family that an installed package adds."""
OWN: Mapping[str, Family] = {"poisson": POISSON}
HELIOS = "helios"


def generators() -> Mapping[str, Generator]:
    """Listed generators that need no data set's sums, by whole name; most need measured tables. Families have
    others, too."""
    families = [OWN.get(name) or INSTALLED.get(name) for name in sorted({*OWN, *INSTALLED.names()})]
    return {name: one for family in families if family is not None for name, one in family.listed.items()}


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
    first = name.partition("/")[0]
    family = OWN.get(first) or INSTALLED.get(first)
    if family is None:
        return None
    return family.listed.get(name) or family.other(name)


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
