"""When a placer that stands by loses patience."""

from penstock.clock import LedgerClock
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.replica import Replica
from penstock.model.decisions.ledger_events import TimerSet, TimerSubject
from penstock_services.placer.shell.standby import TAKEOVER_MS, _patience_ms

HOUR_MS = 3_600_000


def test_a_placer_that_has_just_taken_office_gets_time_for_what_is_overdue() -> None:
    """Nobody was in office for an hour. One placer begins; the other reads its first record, and sees an old
    timer.

    Did it take over at once, the first would see the same of it: the office would change hands as fast as the
    log can write, and the timer would never fire.
    """
    replica = Replica()
    about = TimerSubject(kind="place_more", id="cell")
    evolve(replica.state, TimerSet(timer_id="cell:place_more", at_ms=1_000, about=about))
    clock = LedgerClock(HOUR_MS, lambda: 100.0, lambda: HOUR_MS)
    assert _patience_ms(replica, clock, {}, now_s=100.0, last_record_s=100.0) == TAKEOVER_MS
    assert _patience_ms(replica, clock, {}, now_s=100.5, last_record_s=100.0) == TAKEOVER_MS - 500
    assert _patience_ms(replica, clock, {}, now_s=110.0, last_record_s=100.0) == 0
