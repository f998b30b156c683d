"""One placement with its explanation, per profile and size of the cell: `python -m
tests.bench.scheduling.policies`.

Cells of N nodes × 8 GPUs in racks of 20 and domains of 200, filled to 90 % with jobs of 1 – 8 GPUs whose
memory is not round, spread at random so that every load class occurs. Nothing is placed while measuring.
"""

import sys
from time import perf_counter_ns

import numpy as np

from penstock.cluster.chance import LazyRng
from penstock.cluster.view import assign
from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling import profiles
from penstock.scheduling.profiles import profile_for
from tests.support.cluster import builders as b

LOAD = 0.9
REPEATS = 300
GANGS = ((1, 0, 1), (1, 0, 4), (4, 0, 1), (4, 2, 1))
"""(workers, parameter servers, GPUs per worker)."""


def loaded_cell(nodes: int) -> CellState:
    """The cell described above; the same in every run."""
    state = b.cell(nodes=nodes, gpus=8, racks=max(1, nodes // 20), domains=max(1, nodes // 200))
    rng = np.random.Generator(np.random.PCG64(1))
    policy = profile_for(PlacerSettings(profile="random")).place
    given = number = 0
    while given < LOAD * nodes * 8:
        number += 1
        gpus = int(rng.choice([1, 1, 1, 2, 4, 8]))
        memory_mib = int(gpus * 8_192 * (1 + rng.random() / 8))
        need = b.need(gpus=gpus, cores=4 * gpus, host_memory_mib=memory_mib)
        job = b.queued(state, f"load-{number}", worker=need)
        plan = policy.place(state, job, LazyRng(0, job.job_id))
        if plan is not None:
            b.apply(state, assign(state, job, plan))
            given += gpus
    return state


def measure(state: CellState, profile: str, workers: int, servers: int, gpus: int) -> tuple[float, float]:
    """(median, 99th percentile) of `place`, µs."""
    policy = profile_for(PlacerSettings(profile=profile)).place
    need = b.need(gpus=gpus, cores=4, host_memory_mib=9_000)
    job_id = f"{profile}-{workers}-{servers}-{gpus}"
    job = b.queued(state, job_id, workers=workers, parameter_servers=servers, worker=need)
    times_ns = []
    for number in range(REPEATS):
        rng = LazyRng(0, str(number))
        began = perf_counter_ns()
        plan = policy.place(state, job, rng)
        times_ns.append(perf_counter_ns() - began)
        assert plan is not None
    median, p99 = np.percentile(times_ns, [50, 99]) / 1_000
    return float(median), float(p99)


def main(sizes: list[int]) -> None:
    print(
        f"{'nodes':>6} {'profile':<14} {'workers':>7} {'servers':>7} {'GPUs':>4} {'p50 µs':>8} {'p99 µs':>8}"
    )
    for nodes in sizes:
        state = loaded_cell(nodes)
        for profile in profiles.names():
            for gang in GANGS:
                median, p99 = measure(state, profile, *gang)
                print(
                    f"{nodes:>6} {profile:<14} {gang[0]:>7} {gang[1]:>7} {gang[2]:>4} {median:>8.1f} "
                    f"{p99:>8.1f}"
                )


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1_000, 10_000])
