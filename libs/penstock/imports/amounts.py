"""Amounts of other schedulers (Kubernetes' `16Gi`, Slurm's `1-02:00:00`, dstack's `24GB..`) in the units
of a job file."""

import math
import re
from typing import Any

from penstock.imports.keys import Keys
from penstock.sdk.job_file.units import MIB_PER_UNIT, MS_PER_UNIT, show

KIB = 1 << 10
BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)
RANGE = re.compile(r"(?P<least>[^.+]*(?:\.[0-9][^.+]*)?)(?:\+|\.\.(?P<most>.*))?")
CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?")
UNLIMITED = frozenset(("unlimited", "infinite", "off", "false", "none", "-1"))
"""`off` is false to YAML."""
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
GPU_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "gpu.nvidia.com/class",
    "karpenter.k8s.aws/instance-gpu-name",
)
"""Labels of Kubernetes' nodes that name a GPU model."""


def memory(text: str, *, bare_mib: float, binary: bool = False) -> str | None:
    """A size in a job file's units, rounded up to MiB; None: it cannot be read. `bare_mib`: MiB in a
    number without a unit. `binary`: G means GiB."""
    found = AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    number, unit, is_binary, byte = float(found[1]), found[2].lower(), bool(found[3]), found[4]
    if not unit and not byte:
        mib = number * bare_mib
    else:
        size = BYTES[unit]
        if (is_binary or binary) and unit:
            size = KIB ** ("kmgtp".index(unit) + 1)
        mib = number * size / KIB**2
    return show(max(1, math.ceil(mib)), MIB_PER_UNIT)


def amount(section: Keys, name: str, text: str, field: str) -> dict[str, Any]:
    """`cores` or `host_memory` of a job file; of a range its lower end, which is noted. Empty where it
    cannot be read."""
    value, ranged = least(text)
    found = cores(value) if field == "cores" else memory(value, bare_mib=1_024, binary=True)
    if found is None:
        section.note(name, f"{text[:32]!r} is not an amount; left out", needed=True)
        return {}
    if ranged:
        section.note(name, f"{text} is a range; {field} is exactly {found}")
    return {field: found}


def least(text: str) -> tuple[str, bool]:
    """The lower end of `24GB..`, `16GB..64GB`, `4+`; and whether it is a range. Of `..64GB` the upper end."""
    found = RANGE.fullmatch(text.strip())
    if found is None:
        return text.strip(), False
    low, high = found["least"].strip(), (found["most"] or "").strip()
    return low or high, low != text.strip()


def slurm_time(text: str) -> str | None:
    """A time limit: minutes, `mm:ss`, `hh:mm:ss`, `d-hh[:mm[:ss]]`; None: unlimited. Raises `ValueError`."""
    if text.strip().lower() in UNLIMITED:
        return None
    found = CLOCK.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:32]!r} is not a time limit; left out")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        seconds = days * 86_400 + (first or 0) * 3_600 + (second or 0) * 60 + (third or 0)
    elif third is not None:
        seconds = (first or 0) * 3_600 + (second or 0) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    return show(seconds * 1_000, MS_PER_UNIT)


def duration(text: str) -> str | None:
    """`72h`, `1d`, plain seconds; None: unlimited. Raises `ValueError`."""
    plain = text.strip().lower()
    if plain in UNLIMITED:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)[a-z]*", plain)
    if found is None:
        raise ValueError(f"{text[:32]!r} is not a duration; left out")
    return show(round(float(found[1]) * SECONDS[found[2] or "s"] * 1_000), MS_PER_UNIT)


def cores(text: str) -> int | None:
    """Whole cores of `4`, `500m` or `1.5`, rounded up; None: it cannot be read."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", text.strip())
    return None if found is None else max(1, math.ceil(float(found[1]) / (1_000 if found[2] else 1)))
