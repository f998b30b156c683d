"""Suggestions for a CSV file that is nearly of our own format: its columns that are probably ours under
another name."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType

from penstock.runtime.files.csv_import import Problem, shown
from penstock.simulator.traces.files.formats import FORMATS, NEEDED, OWN

LIKELY = 0.8  # ratio of `difflib` from which on a column's name counts as a misspelling of ours
NEARLY = 0.75  # share of another format's columns from which on that format is suggested
OTHER_UNIT = re.compile(
    r"(?:_|\b)(?:ms|msec|millis|us|ns|min|mins|minutes?|hours?|h|days?)$|Millis$", re.IGNORECASE
)
NOT_LETTERS = re.compile(r"[^a-z0-9]")
PLAIN = {
    "start": re.compile(r"(?i)start(?:ed)?_?(?:at|time|s|ts)?"),
    "end": re.compile(r"(?i)(?:end|finish|complet)(?:ed|ion)?_?(?:at|time|s|ts)?"),
}
"""Names of moments whose difference is a run time."""
COUNTED = ("", "one rename", "two renames", "three renames", "four renames")
SYNONYMS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "job_id": ("jobid", "id", "jobname", "job", "name", "uid"),
        "submit_s": (
            "submittime",
            "submit",
            "submitted",
            "submittedat",
            "submissiontime",
            "submitat",
            "arrivaltime",
            "arrival",
            "creationtime",
            "createdat",
            "created",
            "queuedat",
            "timestamp",
            "time",
        ),
        "duration_s": (
            "duration",
            "durationsec",
            "durationseconds",
            "runtime",
            "runtimes",
            "elapsed",
            "elapsedtime",
            "walltime",
        ),
        "gpus": (
            "numgpu",
            "numgpus",
            "gpunum",
            "ngpu",
            "ngpus",
            "gpucount",
            "gpu",
            "reqgpus",
            "gpusrequested",
            "requestedgpus",
        ),
    }
)
"""Required column of our CSV → other names for it, without case and punctuation; likeliest first."""


def likely_column(ours: str, theirs: Sequence[str]) -> str | None:
    """The file's column that is probably this one of ours; a name with another unit does not match."""
    free = {NOT_LETTERS.sub("", name.lower()): name for name in theirs if not OTHER_UNIT.search(name)}
    for synonym in (NOT_LETTERS.sub("", ours), *SYNONYMS.get(ours, ())):
        if synonym in free:
            return free[synonym]
    near = get_close_matches(ours, free.values(), 1, LIKELY)
    return near[0] if near else None


def near_misses(columns: Sequence[str]) -> Sequence[Problem]:
    """Problems of a header that is of no format, with the option that corrects them;
    empty: it resembles none."""
    missing = [name for name in NEEDED if name not in columns]
    free = [name for name in columns if name not in OWN]
    renames: dict[str, str] = {}
    for ours in missing:
        found = likely_column(ours, free)
        if found is not None:
            renames[ours] = found
            free.remove(found)
    start, end = (
        next((name for name in free if PLAIN[what].fullmatch(name)), "") for what in ("start", "end")
    )
    if "duration_s" not in renames and "duration_s" in missing and start and end:
        renames["duration_s"] = f"{end}-{start}"
    missing = [name for name in missing if name not in renames]
    problems: list[Problem] = []
    if renames:
        option = f"--columns {','.join(f'{ours}={shown(theirs)}' for ours, theirs in renames.items())}"
        text = f"not our own CSV; these are renames: {option}"
        if not missing:
            text = f"our own CSV is {COUNTED[len(renames)]} away: {option}"
        problems.append(Problem(1, "", text))
    if len(missing) < len(NEEDED):
        problems += [Problem(1, name, "missing (format csv)") for name in sorted(missing)]
    others = {name: form.lacks(columns) for name, form in FORMATS.items() if form.header and name != "csv"}
    nearest = min(others, key=lambda name: len(others[name]) / len(FORMATS[name].columns))
    if len(others[nearest]) < (1 - NEARLY) * len(FORMATS[nearest].columns):
        problems.append(Problem(1, "", f"format {nearest} lacks {', '.join(others[nearest])}"))
    return problems


def likely_slips(unread: Sequence[str], columns: Sequence[str], read: Sequence[str]) -> Mapping[str, str]:
    """Unread columns → the format's column that was probably meant."""
    free = sorted({*read} - {*columns})
    return {column: near[0] for column in unread if (near := get_close_matches(column, free, 1, LIKELY))}
