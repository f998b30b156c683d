"""The grouping genetic algorithm on bursts of several sizes: ms of the processor, and what it gains over the
immediate path. `python -m tests.bench.scheduling.bursts`.

A third of the nodes' GPUs are taken; each job has one to four workers of one or two GPUs. The immediate path
is first fit on the same nodes, job by job.
"""

from time import process_time
from typing import NamedTuple

import numpy as np

from penstock.scheduling.bursts.burst_plans import Costs, Gang, Machine, Place, Problem
from penstock.scheduling.bursts.gga import GeneticSearch, gga
from penstock_papers.liquid import ExactSearch

SIZES = ((8, 5), (50, 32), (200, 128), (400, 256))
"""(jobs, nodes)."""
GPUS, RACK_NODES = 8, 16


class Measured(NamedTuple):
    """Eq. 8 is a cost with its sign turned: a `share` below 1 is better than the immediate path."""

    took_ms: float
    share: float
    children: int
    placed: int
    given: int
    """Jobs that start, by its plan and by the immediate path."""


def burst(jobs: int, nodes: int, seed: int = 1) -> Problem:
    rng = np.random.default_rng(seed)
    everywhere = (1 << nodes) - 1
    racks = -(-nodes // RACK_NODES)
    machines = []
    for node in range(nodes):
        used = int(rng.integers(0, 6))
        free = (GPUS - used, 4 * (GPUS - used) + 8, 1 << 20, 1 << 20)
        machines.append(Machine(node // RACK_NODES, 0, GPUS, used, free))
    gangs = [
        Gang(
            int(rng.integers(1, 5)),
            (int(rng.integers(1, 3)), 2, 1_024, 10),
            int(rng.integers(0, 2)),
            (0, 2, 1_024, 10),
            everywhere,
            everywhere,
        )
        for _ in range(jobs)
    ]
    return Problem(machines, gangs, Costs((2,) * racks, (4,), 4), 0.5, _first_fit(machines, gangs))


def _first_fit(machines: list[Machine], gangs: list[Gang]) -> list[Place]:
    free = [list(machine.free) for machine in machines]
    places: list[Place] = []
    for gang in gangs:
        needs = [gang.worker] * gang.workers + [gang.server] * gang.servers
        taken: list[int] = []
        for need in needs:
            at = next(
                (
                    node
                    for node, has in enumerate(free)
                    if all(h >= n for h, n in zip(has, need, strict=True))
                ),
                None,
            )
            if at is None:
                break
            free[at] = [h - n for h, n in zip(free[at], need, strict=True)]
            taken.append(at)
        if len(taken) < len(needs):
            for at, need in zip(taken, needs, strict=False):
                free[at] = [h + n for h, n in zip(free[at], need, strict=True)]
            taken = []
        places.append(tuple(taken))
    return places


def measure(jobs: int, nodes: int, *, exact: bool = False) -> Measured:
    problem = burst(jobs, nodes)
    began_s = process_time()
    found = gga(problem, np.random.default_rng(0), search=ExactSearch if exact else GeneticSearch)
    took_ms = (process_time() - began_s) * 1_000
    placed, given = (sum(map(bool, places)) for places in (found.places, problem.given))
    return Measured(took_ms, found.fitness / found.given_fitness, found.children, placed, given)


def main() -> None:
    for jobs, nodes in SIZES:
        found, exact = measure(jobs, nodes), measure(jobs, nodes, exact=True)
        print(
            f"{jobs} jobs on {nodes} nodes: {found.took_ms:.0f} ms, {found.children} children; starts "
            f"{found.placed}, the immediate path {found.given}; "
            f"{found.share:.3f} of its cost; as in the paper {exact.share:.3f} in {exact.took_ms:.0f} ms"
        )


if __name__ == "__main__":
    main()
