"""A placer over its lives: stands by, takes over, decides, appends, reads back, sends orders.

The decisions are the placer's own core; this is its shell without a network (`penstock_services.placer.shell`), turn by turn,
so that it can die between any two, fall asleep and wake up as a zombie, or be cut off from one topic alone:

    inputs ─▶ decide ─▶ append ─▶ ledger ─▶ read back ─▶ dispatch ─▶ orders
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.clock import LedgerClock
from penstock.ledger.record import Draft, Head, read_valid, write
from penstock.ledger.replica import Replica
from penstock.ledger.snapshot import load
from penstock.model.event import Event
from penstock.model.ledger_events import Order, PlacerSettings, TermStarted
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock_services.placer.core.answer import Input, Moment, answer_input, answer_timer
from penstock_services.placer.core.orders import orders_of, outstanding
from penstock_services.placer.core.step import PlacerCore
from tests.faults.lab.log import Append, Log, Record
from tests.faults.lab.world import Clock, Life, Loop, World

TAKEOVER_S = 2.0
MAX_INPUTS_PER_TURN = 16
MAX_TIMERS_PER_TURN = 32
MAX_IN_FLIGHT = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 20.0  # between a death and the next life


class Snapshot(NamedTuple):
    """A state as it was written down, and where in the ledger that was."""

    state: bytes
    head: Head
    offset: int


class Pending(NamedTuple):
    """A record on its way to the log and back."""

    head: Head
    value: bytes
    facts: Sequence[Event]


class Placer:
    """The process under one name, life after life."""

    def __init__(
        self,
        world: World,
        log: Log,
        name: str,
        settings: PlacerSettings,
        clock: Clock,
        snapshots: Sequence[Snapshot],
    ) -> None:
        self.world = world
        self.log = log
        self.name = name
        self.settings = settings
        self.clock = clock
        self.snapshots = snapshots
        self.term: Term | None = None
        self.lives = 0
        self.fenced = 0

    def start(self, *, standing_by: bool = False) -> None:
        """Nothing, if it lives."""
        if self.term is None or not self.term.life.alive:
            self.lives += 1
            self.term = Term(self, standing_by=standing_by)

    def replaced(self) -> None:
        """It read another's record: it begins again and stands by."""
        self.fenced += 1
        self.start(standing_by=True)

    def died(self) -> None:
        calm = self.world.calm
        pause_s = FIRST_PAUSE_S if calm else self.world.within(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.world.at(pause_s, self.start)

    @property
    def serving(self) -> "Term | None":
        """Its life, if it believes that it is in office."""
        term = self.term
        return term if term is not None and term.life.alive and term.core is not None else None


class Term:
    """One life. `core` is None until its own `TermStarted` was read back as valid."""

    def __init__(self, placer: Placer, *, standing_by: bool) -> None:
        self._placer = placer
        self._world, self._log = placer.world, placer.log
        self.life = Life(placer.world, placer.name, self._died)
        self.core: PlacerCore | None = None
        self._ledger = self._log.partition(Topic.LEDGER)
        self._replica = self._restored()
        self._standing_by = standing_by
        self._own: bytes | None = None
        """Our `TermStarted`, while it is on its way."""
        self._end = self._ledger.end
        self._unanswered_s: dict[str, float] = {}
        self._watching = False
        self._heard = (-1, 0.0)
        """Seq of the last valid record, and when it came: whoever writes is alive."""
        self._in_flight: Append | None = None
        self._clock = LedgerClock(self._replica.state.now_ms, placer.clock.monotonic_s, placer.clock.wall_ms)
        self._inputs = {topic: self._log.partition(topic) for topic in INPUT_TOPICS}
        self.following = Loop(self.life, self._follow, "following the ledger")
        self._log.read(self.following, self._ledger)
        if standing_by:
            self._log.read(self.following, *self._inputs.values())
        self.following.kick()

    def _restored(self) -> Replica:
        """From the latest snapshot; now and then there is none to be had, and it folds from the beginning."""
        snapshots = self._placer.snapshots
        if not snapshots or self._world.rng.random() < 0.2:
            return Replica()
        latest = snapshots[-1]
        return Replica(load(latest.state), latest.head, latest.offset)

    def _died(self) -> None:
        if self._in_flight is not None:
            self._log.cut_off(self._in_flight)
        self._placer.died()

    # ------------------------------------------------------------------------- before it is in office

    def _follow(self) -> None:
        """Folds what there is; then stands by, appends its term, or finds that its term has begun."""
        if self.core is not None:
            self._read_back()
            return
        replica, ours = self._replica, None
        while replica.offset < self._ledger.end:
            value = self._ledger.records[replica.offset].value
            taken = replica.take(value, replica.offset)
            if value == self._own:
                ours = taken is not None
        if self._standing_by:
            self._watch()
        elif self._own is None:
            self._take_office()
        elif ours is not None:
            if ours and replica.head.term == self._term_of_own:
                self._serve()
            else:
                self._own = None
                self._take_office()

    def _watch(self) -> None:
        """Takes over when an input or a timer that is due has been waiting for `TAKEOVER_S`."""
        now_s, state = self._world.now_s, self._replica.state
        if self._replica.head.seq != self._heard[0]:
            self._heard = (self._replica.head.seq, now_s)
        waits_s: list[float] = []
        for topic, partition in self._inputs.items():
            if state.positions.get((topic, 0), 0) >= partition.end:
                self._unanswered_s.pop(topic, None)
            else:
                waits_s.append(now_s - self._unanswered_s.setdefault(topic, now_s))
        timer = state.next_timer()
        if timer is not None:
            due_s = (timer[0] - self._clock.now_ms(state.now_ms)) / 1_000
            waits_s.append(min(-due_s, now_s - self._heard[1]))
        if not waits_s:
            return
        if max(waits_s) >= TAKEOVER_S:
            self._world.tell(f"{self._placer.name} takes over: nobody answered")
            self._standing_by = False
            self._take_office()
        elif not self._watching:
            self._watching = True
            self._world.at(max(0.001, TAKEOVER_S - max(waits_s)), self._look)

    def _look(self) -> None:
        self._watching = False
        self.following.kick()

    def _take_office(self) -> None:
        """Appends a `TermStarted` behind all that was folded."""
        replica, placer = self._replica, self._placer
        term = replica.head.term + 1
        now_ms = max(replica.state.now_ms, placer.clock.wall_ms())
        fact = TermStarted(term=term, placer_id=placer.name, settings=placer.settings)
        draft = Draft(term, now_ms, {"placer_id": placer.name}, "committed", None, [fact])
        self._own = write(replica.head, draft)[1]
        self._term_of_own = term
        self._in_flight = self._log.append(placer.name, self._ledger, [Record(self._own)])

    # ----------------------------------------------------------------------------------- in office

    def _serve(self) -> None:
        replica = self._replica
        self._world.tell(f"{self._placer.name} begins term {replica.head.term} at seq {replica.head.seq}")
        self.core = PlacerCore(replica.state)
        self._tail = self._valid = replica.head
        self._offset = replica.offset
        self._clock = LedgerClock(
            replica.state.now_ms, self._placer.clock.monotonic_s, self._placer.clock.wall_ms
        )
        positions = replica.state.positions
        self._read_to = {topic: positions.get((topic, 0), 0) for topic in INPUT_TOPICS}
        self._pending: deque[Pending] = deque()
        self._to_append: list[Record] = []
        self._in_flight = None
        self._wake_s = float("inf")
        self.deciding = Loop(self.life, self._decide, "reading inputs")
        self.appending = Loop(self.life, self._append, "appending records")
        self.sending = Loop(self.life, self._send, "sending orders")
        self._log.read(self.deciding, *self._inputs.values())
        self._orders: deque[Order] = deque(
            outstanding(replica.state, list(replica.state.nodes), replica.head.seq)
        )
        self.sending.kick()
        self.deciding.kick()

    @property
    def settled(self) -> bool:
        """Nothing of its own is on the way: its state is what the ledger says."""
        return self.core is not None and not self._pending

    def _decide(self) -> None:
        assert self.core is not None
        if len(self._pending) > MAX_IN_FLIGHT:
            return
        fired = 0
        while (due := self.core.state.next_timer()) is not None and due[0] <= self._now_ms():
            if fired == MAX_TIMERS_PER_TURN:
                break
            fired += 1
            moment = Moment(self._tail.seq + 1, self._tail.term, self._now_ms())
            self._record(answer_timer(self.core, moment, due[1]))
        for topic, offset, record in self._next_inputs():
            moment = Moment(self._tail.seq + 1, self._tail.term, self._now_ms())
            found = Input(topic, 0, offset, record.headers, record.value)
            self._record(answer_input(self.core, moment, found).draft)
        if self._to_append:
            self.appending.kick()
        if any(self._read_to[topic] < self._inputs[topic].end for topic in INPUT_TOPICS):
            self.deciding.kick()
        self._wake()

    def _now_ms(self) -> int:
        assert self.core is not None
        return self._clock.now_ms(self.core.state.now_ms)

    def _next_inputs(self) -> list[tuple[str, int, Record]]:
        """What one read returns: each topic in its order, topics as they come."""
        rng = self._world.rng
        found: list[tuple[str, int, Record]] = []
        most = MAX_INPUTS_PER_TURN if self._world.calm else int(rng.integers(1, MAX_INPUTS_PER_TURN + 1))
        while len(found) < most:
            open_topics = [topic for topic in INPUT_TOPICS if self._read_to[topic] < self._inputs[topic].end]
            if not open_topics:
                break
            topic = open_topics[int(rng.integers(len(open_topics)))]
            offset = self._read_to[topic]
            self._read_to[topic] += 1
            found.append((str(topic), offset, self._inputs[topic].records[offset]))
        return found

    def _wake(self) -> None:
        """Comes back for the next timer."""
        assert self.core is not None
        due = self.core.state.next_timer()
        if due is None:
            return
        at_s = self._world.now_s + max(0.0, (due[0] - self._now_ms()) / 1_000)
        if at_s < self._wake_s or self._wake_s <= self._world.now_s:
            self._wake_s = at_s
            self._world.at(at_s - self._world.now_s, self.deciding.kick)

    def _record(self, draft: Draft) -> None:
        self._tail, value = write(self._tail, draft)
        self._pending.append(Pending(self._tail, value, draft.facts))
        self._to_append.append(Record(value))

    def _append(self) -> None:
        """One append at a time, with everything decided meanwhile."""
        if self._in_flight is None and self._to_append:
            records, self._to_append = self._to_append, []
            self._in_flight = self._log.append(self._placer.name, self._ledger, records, self._appended)

    def _appended(self) -> None:
        self._in_flight = None
        if self.life.alive and not self.life.may_crash("its records are appended"):
            self.appending.kick()

    def _read_back(self) -> None:
        assert self.core is not None
        while self._offset < self._ledger.end:
            value = self._ledger.records[self._offset].value
            self._offset += 1
            if self._pending and self._pending[0].value == value:
                pending = self._pending.popleft()
                self._valid = pending.head
                for fact in pending.facts:
                    self._orders += orders_of(self.core.state, fact, pending.head.seq)
            elif read_valid(self._valid, value) is not None:
                self._world.tell(f"{self._placer.name} was replaced in term {self._tail.term}")
                self.life.alive = False
                if self._in_flight is not None:
                    self._log.cut_off(self._in_flight)
                self._world.at(FIRST_PAUSE_S, self._placer.replaced)
                return
        self.sending.kick()
        self.deciding.kick()

    def _send(self) -> None:
        """Each node's orders in ledger order; a death in between leaves the rest unsent."""
        while self._orders:
            order = self._orders.popleft()
            lane = self._log.partition(Topic.ORDERS, order.node_id)
            self._log.append(self._placer.name, lane, [Record(order)])
            if self._orders and self.life.may_crash("some of its orders are sent"):
                return
