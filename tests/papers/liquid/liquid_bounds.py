"""What Liquid's jobs allow at most: no placement of a job is faster, no schedule of a batch is shorter,
whoever plans it.

Computed from the job model alone, without any policy: all placements of a gang are tried on idle nodes, so
that nobody is in its way. A batch then takes at least what as many jobs at once as the GPUs allow take at
those speeds, the shortest first, which is the best mean time on equal machines (Smith's rule); and at least
the longest job, or the work over the GPUs.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heapreplace
from itertools import product
from math import inf
from statistics import fmean

from penstock.simulator.job_models.model import Allocation, JobModel, Placement
from penstock.simulator.traces.jobs import TraceJob


def placements(tasks: int, servers: int, node_gpus: int) -> Iterator[Placement]:
    """Of workers, then parameter servers, each with one GPU, on nodes of `node_gpus`."""
    roles = (False,) * (tasks - servers) + (True,) * servers
    for nodes in product(range(tasks), repeat=tasks):
        held: dict[str, Allocation] = {}
        for node, is_server in zip(nodes, roles, strict=True):
            before = held.get(f"{node}", Allocation(workers=0))
            held[f"{node}"] = before._replace(
                gpus=(*before.gpus, len(before.gpus)),
                workers=before.workers + (not is_server),
                parameter_servers=before.parameter_servers + is_server,
            )
        if all(len(one.gpus) <= node_gpus for one in held.values()):
            yield held


def shortest_s(model: JobModel, job: TraceJob, node_gpus: int) -> float:
    """Its run time at its best placement, alone."""
    tasks = (job.workers or 1) + job.parameter_servers
    return model.work_s(job) / max(
        model.speed(job, held, ()) for held in _placements(tasks, job.parameter_servers, node_gpus)
    )


@lru_cache
def _placements(tasks: int, servers: int, node_gpus: int) -> Sequence[Placement]:
    return tuple(placements(tasks, servers, node_gpus))


def least_mean_s(times_s: Sequence[float], at_once: int) -> float:
    """Of the completion times, all submitted at once."""
    free_s = [0.0] * at_once
    ends_s = []
    for time_s in sorted(times_s):
        ends_s.append(free_s[0] + time_s)
        heapreplace(free_s, ends_s[-1])
    return fmean(ends_s)


def least_makespan_s(times_s: Sequence[float], at_once: int) -> float:
    return max(sum(times_s) / at_once, max(times_s, default=-inf))
