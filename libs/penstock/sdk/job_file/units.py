"""Parser of durations, sizes and rates in human units, with their exact meaning in machine units.

| kind | written | without a unit | becomes |
|---|---|---|---|
| duration | `500ms` `90s` `10m` `2h` `1d` `1h30m` | seconds | whole milliseconds |
| memory | `512MiB` `8GiB` `1TiB` | MiB | whole MiB, rounded up |
| rate | `800Mbit` `10Gbit` | Mbit/s | whole Mbit/s, rounded up |

A plain number means the same as its text, so that `host_memory: 8` of a job file and `--host-memory 8` are
one job. Memory units are binary on purpose: `8GB` is refused with `8GiB` as remedy rather than read as
either.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from penstock.text.redaction import brief

MS_PER_UNIT = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
MIB_PER_UNIT = {"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}
MBIT_PER_UNIT = {"Mbit": 1, "Gbit": 1_000}

_NUMBER = r"[0-9]{1,15}(\.[0-9]{1,6})?"
DURATION_PATTERN = rf"^({_NUMBER}(ms|s|m|h|d))+$"
MEMORY_PATTERN = rf"^{_NUMBER} ?(MiB|GiB|TiB)$"
RATE_PATTERN = rf"^{_NUMBER} ?(Mbit|Gbit)$"

_DURATION_PART = re.compile(rf"({_NUMBER})(ms|s|m|h|d)")
_QUANTITY = re.compile(rf"^({_NUMBER}) ?([A-Za-z/]+)$")


def duration_ms(value: object) -> int:
    """Milliseconds ≥ 0, rounded to the nearest. Raises ValueError with the remedy."""
    remedy = "write a duration such as 90s, 10m, 2h or 1d, or plain seconds"
    if isinstance(value, str) and not re.fullmatch(_NUMBER, value):
        if re.fullmatch(DURATION_PATTERN, value) is None:
            raise ValueError(f"{brief(value)} is not a duration; {remedy}")
        parts = ((Fraction(part[1]), MS_PER_UNIT[part[3]]) for part in _DURATION_PART.finditer(value))
        return round(sum(number * unit for number, unit in parts))
    return round(_plain(value, "duration", remedy) * 1_000)


def memory_mib(value: object) -> int:
    """MiB ≥ 0, rounded up. Raises ValueError with the remedy."""
    return _quantity(value, "size", MIB_PER_UNIT, "write a size such as 512MiB or 8GiB, or plain MiB")


def rate_mbps(value: object) -> int:
    """Mbit/s ≥ 0, rounded up. Raises ValueError with the remedy."""
    return _quantity(value, "rate", MBIT_PER_UNIT, "write a rate such as 800Mbit or 10Gbit, or plain Mbit/s")


def _quantity(value: object, kind: str, units: dict[str, int], remedy: str) -> int:
    if not isinstance(value, str) or re.fullmatch(_NUMBER, value):
        return math.ceil(_plain(value, kind, remedy))
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise ValueError(f"{brief(value)} is not a {kind}; {remedy}")
    if match[3] not in units:
        binary = next((unit for unit in units if unit[0].lower() == match[3][0].lower()), None)
        hint = f"did you mean {match[1]}{binary}?" if binary else remedy
        raise ValueError(f"{brief(value)} has none of the units {', '.join(units)}; {hint}")
    return math.ceil(Fraction(match[1]) * units[match[3]])


def show(number: int, units: Mapping[str, int]) -> str:
    """The number in the largest unit that divides it: 3_600_000 ms is `1h`. Inverse of the parsers above."""
    fitting = [unit for unit, size in units.items() if number % size == 0 and number >= size]
    unit = max(fitting, key=units.__getitem__, default=next(iter(units)))
    return f"{number // units[unit]}{unit}"


def _plain(value: object, kind: str, remedy: str) -> Fraction:
    """A number without unit, or its text, ≥ 0 and finite. Raises ValueError."""
    if isinstance(value, str):
        return Fraction(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{brief(value)} is not a {kind}; {remedy}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{brief(value)} is not a finite {kind}; {remedy}")
    if value < 0:
        raise ValueError(f"{brief(value)} is negative; {remedy}")
    return Fraction(value)
