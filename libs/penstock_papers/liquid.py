"""Liquid's algorithms as published: the weights of its program, and its genetic algorithm without Penstock's
additions.

The bodies are the product's (`penstock.scheduling.place.liquid`, `penstock.scheduling.bursts.gga`); here is
what the source has otherwise. Source: Liquid §5.2 eq. 2, §5.3; the program published with it.
"""

from penstock.scheduling.bursts.burst_plans import Plan
from penstock.scheduling.bursts.gga import GeneticSearch
from penstock.scheduling.place.liquid import Network

IN_RACK, IN_DOMAIN, BEYOND = 1, 4, 40
"""PairCost in the same rack, in the same domain, and between domains. Source: the program published with
Liquid."""


class Levels(Network):
    """PairCost by level alone, whatever the number of nodes. The program multiplies these weights by the
    job's bandwidth, a constant within one job's plans, which is left out."""

    __slots__ = ()

    def inside_rack(self, rack: str, domain: str) -> int:
        return IN_RACK

    def inside_domain(self, domain: str) -> int:
        return IN_DOMAIN

    def across_domains(self) -> int:
        return BEYOND


class ExactSearch(GeneticSearch):
    """One population, containers placed again by first fit alone, no exchanges. Departure: the given plan is
    in the population, so that no plan is worse."""

    RESTARTS = False

    def filled_near(self, number: int) -> bool:
        return False

    def repaired_near(self) -> bool:
        return False

    def exchanged(self, plan: Plan) -> Plan:
        return plan
