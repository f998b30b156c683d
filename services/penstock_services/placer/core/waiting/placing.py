"""The placer's pass over the waiting jobs (`penstock.scheduling.scheduling_pass`), on the state itself: each
result becomes facts, which are folded before the next job is tried."""

from collections.abc import Callable, Container, Iterator
from itertools import islice
from typing import NamedTuple, TypeAlias

from penstock.cluster.capacity import never_fits
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.ledger_events import PlacementDecided, PlacementExplanation
from penstock.model.decisions.plans import PlanAdopted
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.scheduling.scheduling_pass import (
    Failed,
    Full,
    Never,
    Reclaims,
    Reserved,
    Starts,
    Trying,
    Unreached,
    Waits,
    scheduling_pass,
)
from penstock.scheduling.stages.protocols import Choose, Profile, Turns
from penstock.scheduling.stages.regroup import has_whole_gpus, waits_for_plan
from penstock_services.placer.core.common import MAX_PLACEMENTS_PER_RECORD, RecordSpace, continuation
from penstock_services.placer.core.waiting.pass_reservation import PassReservation, without_reservation
from penstock_services.placer.core.waiting.reclaiming import Reclaiming
from penstock_services.placer.core.waiting.retries import Attempts


class Choice(NamedTuple):
    """What the policy has chosen for a job."""

    placement: PlacementDecided
    explanation: PlacementExplanation


Chosen: TypeAlias = Starts[Choice] | Waits | Failed
"""The policy's answer for one job."""


class Asking(NamedTuple):
    """How a pass asks the policy. A policy that raises costs the choice for that job and no other."""

    choose: Callable[[CellState, JobState, Choose | None], Chosen]
    """The choice given, or the place stage's."""
    facts: Callable[[CellState, Chosen], Iterator[Event]]
    """Of its answer."""
    known: Container[str]
    """Jobs on which the policy is known to fail in this record."""
    failed: Container[str]
    """Jobs on which the policy has failed in this record; grows."""


class Placing(Trying[tuple[object, ...], Choice]):
    """One pass. FIFO with a bounded backfill window, or the profile's own order.

    The cell may have become smaller since the head of the queue was judged: that job must not wait for ever.
    """

    def __init__(
        self,
        state: CellState,
        profile: Profile,
        settings: PlacerSettings,
        asking: Asking,
        reclaiming: Reclaiming,
        attempts: Attempts,
    ) -> None:
        self._state, self._settings, self._order = state, settings, profile.order
        self._asking, self._reclaiming, self._attempts = asking, reclaiming, attempts
        self._reservation = PassReservation(profile)
        self._of_plan = waits_for_plan(state, profile.regroup)
        self._bounded = profile.order is not None and profile.backfill is None
        """Whether jobs may have been left out: a tenant's first job may come alone."""
        self._alike = not self._reservation.tells_apart
        self.makes_room = profile.backfill is not None or profile.reclaim is not None
        self._space, self._parked = RecordSpace(), False
        self.tried: set[str] = set()
        self._cut = False
        """Whether the pass has ended before jobs that it was to try."""
        self.full = False
        """Whether the pass goes on in another record."""

    def facts(self) -> Iterator[Event]:
        """Of all results of the pass."""
        state = self._state
        for result in scheduling_pass(self._turns(), self, self._settings.backfill_window):
            match result:
                case Waits():
                    pass
                case Starts() | Failed():
                    yield from self._asking.facts(state, result)
                case Never(job, reason):
                    self._parked = True
                    yield from self._attempts.park(state, job, reason)
                case Reserved(_, unit):
                    yield PlanAdopted(units=(*without_reservation(state), unit))
                case Reclaims(_, found):
                    yield from self._reclaiming.carry_out(state, found)
                case Unreached(job):
                    self.tried.discard(job.job_id)
                    self._cut = True
                case Full():
                    self.full = True
                    yield continuation(state)
                    return
        if self._cut:
            yield from self._owners()

    def leaves_others(self) -> bool:
        """Whether jobs that were not tried may start where they delay nobody."""
        return not self._of_plan and (self._bounded or not self._state.holding)

    def chooser(self) -> Choose | None:
        """As `PassReservation.chooser`."""
        return self._reservation.chooser()

    def done(self) -> Iterator[Event]:
        """All jobs that can be were tried."""
        yield from self._reservation.done(self._state)
        yield from self._reclaiming.done(self._state)
        if self._parked and self._state.queue:
            yield continuation(self._state)

    def _turns(self) -> Turns:
        """The jobs whose turn it is, up to where all wait for the head of the queue; without those that start
        with a unit of a plan."""
        state, reach = self._state, self._settings.backfill_window + MAX_PLACEMENTS_PER_RECORD
        ids = iter(state.queue.values()[:reach]) if self._order is None else self._order.order(state)
        held_up = self._held_up()
        for job_id in islice(ids, reach):
            job = state.jobs[job_id]
            if self._of_plan and job.estimate is not None and has_whole_gpus(job.estimate.worker):
                continue
            unit = state.planned.get(job_id) if state.planned else None
            if unit is not None and unit.proposed is not None:
                continue
            if held_up and job is not self.head:
                self._cut = True
                return
            self.tried.add(job_id)
            if (yield job) or job is self.head:
                held_up = self._held_up()

    def _held_up(self) -> bool:
        """Whether all jobs wait for the head of the queue, which is another one when that has started."""
        self.head = head = self._state.head_of_queue()
        return head is not None and holds_up(head, self._settings, self._asking.failed)

    def alike(self, job: JobState) -> tuple[object, ...]:
        """As `Trying`."""
        return job.demand_key if self._alike else self._reservation.alike(self._state, job)

    def place(self, job: JobState, key: tuple[object, ...]) -> Chosen | Full:
        """As `Trying`."""
        if not self._space.holds(job.spec.workers + job.spec.parameter_servers):
            return Full(job)
        if not (self._reservation.may_start(self._state, job) or job.job_id in self._asking.known):
            return Waits(job)
        found = self._asking.choose(self._state, job, self._reservation.chooser())
        if isinstance(found, Starts):
            self._space.add(len(found.place.placement.tasks))
        return found

    def never(self, job: JobState) -> str | None:
        """As `Trying`."""
        return never_fits(self._state, job.demand)

    def make_room(self, job: JobState) -> Iterator[Reserved | Reclaims]:
        """As `Trying`."""
        if (unit := self._reservation.unit(self._state, job)) is not None:
            yield Reserved(job, unit)
        if (found := self._reclaiming.found(self._state, job)) is not None:
            yield Reclaims(job, found)

    def settled(self) -> bool:
        """As `Trying`: none can start, nodes are reserved, nothing can be reclaimed, no choice is known to
        fail, and the head of the queue is not to be parked."""
        state, head = self._state, self.head
        if self._space.placed or self._asking.known:
            return False
        if not (self._reservation.settled(state) and self._reclaiming.idle(state)):
            return False
        return head is None or never_fits(state, head.demand) is None

    def _owners(self) -> Iterator[Event]:
        """Jobs behind the end of the window for which nodes are reserved in vain: they start now, or their
        reservations end."""
        self._bounded = True
        for owner in self._reclaiming.due(self._state, self.tried):
            self.tried.add(owner.job_id)
            yield from self._asking.facts(
                self._state, self._asking.choose(self._state, owner, self._reservation.chooser())
            )


def holds_up(head: JobState, settings: PlacerSettings, failed: Container[str]) -> bool:
    """Whether everybody waits for the head of the queue; never for one on which the policy has just
    failed."""
    return head.backfill_count >= settings.max_overtakes and head.job_id not in failed
