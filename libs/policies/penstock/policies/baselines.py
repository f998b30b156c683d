"""Baselines: `fifo` (first fit), `random`, `even`, and `k8s-default`.

Sources: random, even and the Kubernetes default are the immediate-mode baselines of Liquid §7; first fit is
the textbook rule. The order of the queue is the placer's affair (FIFO with a bounded window): here only
nodes are chosen.
"""

from itertools import islice

from penstock.ledger.index import bits, nth
from penstock.ledger.state import CellState, JobState
from penstock.policies.base import Chance, Plan
from penstock.policies.gang import Gang, place_greedily


class FirstFit:
    """The earliest node that fits. Score: the node's ordinal."""

    @property
    def name(self) -> str:
        return "fifo"

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """The lowest ordinals; chance is not used."""
        return place_greedily(self.name, state, job, self._rank)

    @staticmethod
    def _rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        return [(float(ordinal), ordinal) for ordinal in islice(bits(gang.open(is_worker)), limit)]


class RandomFit:
    """Every node that fits is equally likely. Score: 0 for all, for none is better than another."""

    @property
    def name(self) -> str:
        return "random"

    def place(self, state: CellState, job: JobState, chance: Chance) -> Plan | None:
        """Draws once per task; the alternatives of the explanation are the lowest other ordinals."""

        def rank(gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
            nodes = gang.open(is_worker)
            if not nodes:
                return []
            drawn = nth(nodes, int(chance.generator.integers(nodes.bit_count())))
            others = islice(bits(nodes & ~(1 << drawn)), limit - 1)
            return [(0.0, drawn), *((0.0, ordinal) for ordinal in others)]

        return place_greedily(self.name, state, job, rank)
