"""Parser of past moments: `10:42`, `5m`, a date, or the number of a ledger record."""

import re

from penstock.exits import Exit, Stop
from penstock.sdk.job_file.units import DURATION_PATTERN, duration_ms
from penstock.text.local_time import NotOneMoment, last_time_of_day_ms, moment_ms
from penstock.text.redaction import brief

_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?\Z")
_FORMS = "give a time such as 10:42, how long ago such as 5m, a date such as 2026-05-04T10:42"


def moment(text: str, now_ms: int) -> dict[str, int]:
    """The moment of `--at` as parameters of the gateway: `at`, a record, or `at_ms`. Raises `Stop`."""
    if text.isascii() and text.isdigit():
        return {"at": int(text)}
    if re.fullmatch(DURATION_PATTERN, text):
        return {"at_ms": max(0, now_ms - duration_ms(text))}
    return {"at_ms": _past_ms("--at", text, now_ms, f"{_FORMS}, or a record's number")}


def since(text: str | None, now_ms: int) -> dict[str, int | str]:
    """The moment of `--since`: `since`, which counts by the clock of each node,
    or `since_ms`. Raises `Stop`."""
    if text is None:
        return {}
    if re.fullmatch(DURATION_PATTERN, text):
        return {"since": text}
    return {"since_ms": _past_ms("--since", text, now_ms, _FORMS)}


def _past_ms(option: str, text: str, now_ms: int, forms: str) -> int:
    """A time without a zone is a local one, a time of day the last one. Raises `Stop`."""
    at_ms = _at_ms(option, text, now_ms, forms)
    if at_ms > now_ms:
        raise Stop(Exit.BAD_SPEC, f"{option} {text}: lies ahead; leave it out to ask about now")
    return at_ms


def _at_ms(option: str, text: str, now_ms: int, forms: str) -> int:
    if found := _TIME.match(text):
        hour, minute, second = (int(part or 0) for part in found.groups())
        return last_time_of_day_ms(hour, minute, second, now_ms)
    try:
        return moment_ms(text)
    except NotOneMoment as error:
        raise Stop(Exit.BAD_SPEC, f"{option} {text}: {error}") from None
    except (ValueError, OverflowError):
        raise Stop(Exit.BAD_SPEC, f"{option} {brief(text)}: {forms}") from None
