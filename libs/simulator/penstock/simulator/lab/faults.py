"""The engine in bad weather: what the log and the services may do wrong, as their contracts allow it.

- Events and orders are late, each producer's in its own order, so that topics overtake each other.
- Events and orders come twice, the second time later than anything sent meanwhile (a node tells again).
- The placer crashes between any two of its records. A new one folds the ledger's bytes, must come to the very
  state that the old one had, starts a term and repeats all orders that are not answered.
After every record all invariants are checked. Everything is drawn from one seed.

What nodes do wrong (reboots, silence, zombies) is not here yet.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.cluster.nouns import NodeSpec
from penstock.events.base import Event
from penstock.events.facts import Order, PlacerSettings
from penstock.ledger.replica import Replica
from penstock.ledger.snapshot import dump
from penstock.placer.core.orders import outstanding
from penstock.placer.core.step import Step
from penstock.simulator.engine import Options, Simulation, Unsound
from penstock.simulator.traces.jobs import TraceJob
from penstock.simulator.truths.truth import Work


class Weather(NamedTuple):
    """Probabilities per message or record; seconds."""

    late: float = 0.3
    longest_s: float = 5.0
    """Well below the time after which an unanswered order makes a node Suspect."""
    twice: float = 0.1
    crash: float = 0.02


class FaultySimulation(Simulation):
    """Takes what `Simulation` takes but no sink, and the weather with its seed."""

    def __init__(
        self,
        nodes: Sequence[NodeSpec],
        settings: PlacerSettings,
        work: Work,
        jobs: Iterable[TraceJob],
        options: Options,
        *,
        seed: int,
        weather: Weather = Weather(),  # noqa: B008 - immutable
    ) -> None:
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0xFA17))))
        self._weather = weather
        self._values: list[bytes] = []
        self._sent_s: dict[tuple[str, str], float] = {}
        self.crashes = 0
        self.repeated = 0
        super().__init__(nodes, settings, work, jobs, options, self._values.append)

    def _chance(self, probability: float) -> bool:
        return bool(self._rng.random() < probability)

    def _mail(self, lane: tuple[str, str], deliver: Callable[[], None]) -> None:
        """Late, but not before what was sent on the same lane; perhaps a second time."""
        delay_s = (
            float(self._rng.uniform(0, self._weather.longest_s)) if self._chance(self._weather.late) else 0.0
        )
        at_s = max(self._sent_s.get(lane, 0.0), self.now_s + delay_s)
        self._sent_s[lane] = at_s
        self._at(at_s, deliver)
        if self._chance(self._weather.twice):
            self.repeated += 1
            self._at(at_s + float(self._rng.uniform(0, self._weather.longest_s)), deliver)

    def _deliver(self, event: Event) -> None:
        producer = str(getattr(event, "node_id", ""))
        self._mail((str(event.TOPIC), producer), lambda: self._feed(event))

    def _send(self, order: Order) -> None:
        self._mail(("orders", order.node_id), lambda: self._obey(order))

    def _dispatch(self, step: Step) -> None:
        """A crash comes after the record and before its orders."""
        if self._chance(self._weather.crash):
            self._crash()
        else:
            super()._dispatch(step)

    def _crash(self) -> None:
        self.crashes += 1
        replica = Replica()
        for offset, value in enumerate(self._values):
            if replica.take(value, offset) is None:
                raise Unsound(f"record {offset + 1} of the own ledger is void")
        if dump(replica.state) != dump(self.cell.state):
            raise Unsound(f"seq {self.cell.head.seq}: the ledger folds to another state than the placer's")
        self.cell.take_over(replica.state)
        state = self.cell.state
        for order in outstanding(state, sorted(state.nodes), self.cell.head.seq):
            self._send(order)
