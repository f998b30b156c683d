"""Parser of past moments: `10:42`, `5m`, a date, or the number of a ledger record."""

import re
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from penstock.exits import Exit, Stop
from penstock.sdk.units import duration_ms

_TIME = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)(?::([0-5]\d))?\Z")


def moment(text: str, now_ms: int) -> dict[str, int]:
    """The moment as parameters of the gateway: `at`, a record, or `at_ms`. A time of day is the last one of this zone. Raises `Stop`."""
    if text.isascii() and text.isdigit():
        return {"at": int(text)}
    at_ms = _at_ms(text, now_ms)
    if at_ms > now_ms:
        raise Stop(Exit.BAD_SPEC, f"--at {text}: lies ahead; leave it out to ask about now")
    return {"at_ms": at_ms}


def _at_ms(text: str, now_ms: int) -> int:
    with suppress(ValueError, OverflowError):
        if found := _TIME.match(text):
            hour, minute, second = (int(part or 0) for part in found.groups())
            now = datetime.fromtimestamp(now_ms / 1_000, UTC).astimezone().replace(tzinfo=None)
            at = now.replace(hour=hour, minute=minute, second=second, microsecond=0)
            return _ms(at if at <= now else at - timedelta(days=1))
        return _ms(datetime.fromisoformat(text))
    with suppress(ValueError):
        return max(0, now_ms - duration_ms(text))
    raise Stop(
        Exit.BAD_SPEC,
        f"--at {text}: give a time such as 10:42, how long ago such as 5m, a date such as 2026-05-04T10:42, or a record's number",
    )


def _ms(at: datetime) -> int:
    """Ms since 1970, ≥ 0; a time without a zone is in the local one."""
    return max(0, round(at.astimezone().timestamp() * 1_000))
