"""Clock of the ledger at the start of a term: the time since the last record, by the log's own clock.

Within a term time goes on by the boot-time clock (`penstock.clock.LedgerClock`). Between two terms only the
log has the elapsed time: it has stamped the last record, and the new term's first. The difference counts, for
any values of both clocks, so a log whose clock is wrong by years has no effect; only a step of it while no
record is written has one, and is not followed beyond `MAX_ABSENCE_MS`.

Ideal: the ledger's time is the time of day. Departure: catching up with it would fire deadlines, so that is
done only when none is pending; and a time that was wrong once stays in the ledger, so that is not done beyond
`MAX_ABSENCE_MS` either.
"""

import logging

from pydantic import Field

from penstock.clock import LedgerClock, wall_ms
from penstock.ledger.state.state import CellState
from penstock.runtime.settings import EnvironmentSettings

logger = logging.getLogger(__name__)

DAY_MS = 86_400_000


class AbsenceSettings(EnvironmentSettings):
    """`PENSTOCK_MAX_ABSENCE_DAYS`:
    a longer time without a record counts as a step of the clocks of log and placer."""

    max_absence_days: int = Field(30, ge=1, le=36_500, title="give a number of days above 0")


MAX_ABSENCE_MS = AbsenceSettings.from_env().max_absence_days * DAY_MS


def begin_time(state: CellState, before_ms: int | None, log_ms: int, ago_ms: int) -> LedgerClock:
    """The clock of a term. `before_ms`, `log_ms`: the log's timestamps of the last record before, and of the
    term's first one, which was `ago_ms` ago at most (on Kafka some ms, by which the ledger's time would lag
    for seconds).

    `before_ms` is None where that record is no longer in the log. `state` is as of the term's first record.
    """
    absent_ms = 0 if before_ms is None else max(0, log_ms - before_ms)
    if absent_ms > MAX_ABSENCE_MS:
        _alarm("the log's clock went on between the last record and this term's first", absent_ms)
        absent_ms = 0
    start_ms = state.now_ms + absent_ms
    if not pending_deadlines(state):
        behind_ms = max(0, min(log_ms + ago_ms, wall_ms()) - start_ms)
        if behind_ms <= MAX_ABSENCE_MS:
            start_ms += behind_ms
        elif absent_ms:
            _alarm("the clocks of log and placer are ahead of the ledger's time", behind_ms)
    return LedgerClock(start_ms)


def _alarm(what: str, step_ms: int) -> None:
    logger.error(
        "%s by %.1f days, more than %d: the ledger's time stands still for that, and no deadline fires. Set "
        "the clock of the log's machines (NTP); if it is right, start the placer once with "
        "PENSTOCK_MAX_ABSENCE_DAYS above that",
        what,
        step_ms / DAY_MS,
        MAX_ABSENCE_MS // DAY_MS,
    )


def pending_deadlines(state: CellState) -> bool:
    """Whether time alone can end or stop something."""
    return any(timer.about.kind != "place_more" for timer in state.timers.values())


class ClockAlarm:
    """Logs once per step that a machine's clock is not followed."""

    def __init__(self) -> None:
        self._alarmed = False

    def look(self, clock: LedgerClock) -> None:
        """After each reading; costs a comparison."""
        if bool(clock.wall_ahead_ms) is self._alarmed:
            return
        self._alarmed = not self._alarmed
        if self._alarmed:
            logger.error(
                "this machine's clock is %d s ahead of the ledger's time; deadlines go by the time since "
                "boot. Set the clock (NTP). "
                "If it is right, the ledger's time catches up when a term begins while no deadline is "
                "pending, by PENSTOCK_MAX_ABSENCE_DAYS at most",
                clock.wall_ahead_ms // 1_000,
            )
        else:
            logger.warning("this machine's clock agrees with the ledger's time again")
