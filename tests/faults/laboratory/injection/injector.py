"""What all faults share: the laboratory, a node by chance, and how what is reported about machines is
sent."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.log.port import Message
from penstock.model.inputs.external_events import NodeLeft, NodeSuspected
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.machines.machine import Node

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

WATCH = "watch"
"""Who reports about machines from outside: a cloud, an operator."""
POLL_S = 0.25


class Injector:
    """Acts on a laboratory, with the random numbers of its world."""

    def __init__(self, lab: "Laboratory") -> None:
        self._lab = lab
        self._world = lab.world
        self.suspected: dict[str, None] = {}
        """Machines with a false report, or that were silent: their reporter must report before they are used
        again."""
        self._sent = 0

    def _node(self) -> Node:
        nodes = list(self._lab.nodes.values())
        return nodes[int(self._world.rng.integers(len(nodes)))]

    def report(self, event: NodeLeft | NodeSuspected) -> None:
        """Reports about a machine to the cell."""
        if event.TYPE == NodeSuspected.TYPE:
            self.suspected[event.node_id] = None
        self._sent += 1
        self._send_maybe_twice(message(event, f"{WATCH}/{self._sent}", "/operator"))

    def _send_maybe_twice(self, found: Message) -> None:
        self._lab.send(found)
        if self._world.happens(self._world.rates.twice):
            self._world.at(self._world.within(0, 60), lambda: self._send_while_faulty(found))

    def _send_while_faulty(self, found: Message) -> None:
        if not self._world.calm:
            self._lab.send(found)

    def _once(self, holds: Callable[[], bool], act: Callable[[], object], until_s: float) -> None:
        """Acts as soon as this holds; not in the calm phase, and not later than that."""
        if self._world.calm or self._world.now_s > until_s:
            return
        if holds():
            act()
        else:
            self._world.at(POLL_S, lambda: self._once(holds, act, until_s))
