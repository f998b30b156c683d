"""Exact arrangement of a gang with parameter servers: how many of its workers, and how many of its servers,
each node takes.

Equal tasks never block each other, so first fit is exact for them. Two kinds of tasks may: a server that
takes the cores which a worker needs can leave the gang without any arrangement, though the total of all
resources would do. Dynamic programming over the nodes finds an arrangement whenever one exists. O(nodes ×
workers × workers per node).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.ledger.state.index import Free, Share
from penstock.model.nouns.types import WHOLE_GPU, ResourceVector

NONE = np.iinfo(np.int64).min // 2
"""Servers that fit where the workers do not; the sum with those of all nodes stays below 0."""
Beside = tuple[int, ...]
"""Of one node: servers that fit beside 0, 1, 2, … workers."""


class Role(NamedTuple):
    """Equal tasks of a gang, on one node."""

    need: ResourceVector
    most: int
    """Tasks of the gang; 0 where the node suits none of them."""
    gpu: Share
    """What a wholly free GPU of the node offers such a task."""


def beside(free: Free, worker: Role, server: Role) -> Beside:
    """Servers beside each number of workers, on a node with these free resources."""
    found = [_count(free, server)]
    while len(found) <= worker.most and free.fits(worker.need):
        free = free.less(worker.need, worker.gpu)
        found.append(_count(free, server))
    return tuple(found)


def _count(free: Free, role: Role) -> int:
    if role.need.gpu_share_milli == WHOLE_GPU:
        return max(0, free.count(role.need, role.most))
    count = 0
    while count < role.most and free.fits(role.need):
        free, count = free.less(role.need, role.gpu), count + 1
    return count


def arranged(nodes: Sequence[Beside], workers: int, servers: int) -> list[int] | None:
    """Number of workers on each node, so that all servers fit beside them; None: no arrangement exists.

    The servers of a node are at most `nodes[node][workers there]`. Nodes after those that suffice are not
    listed.
    """
    best = np.full(workers + 1, NONE, dtype=np.int64)
    best[0] = 0
    choices: list[np.ndarray] = []
    for table in nodes:
        after = best + table[0]
        choice = np.zeros(workers + 1, dtype=np.int16)
        for here in range(1, min(len(table) - 1, workers) + 1):
            with_here = best[:-here] + table[here]
            better = with_here > after[here:]
            after[here:][better] = with_here[better]
            choice[here:][better] = here
        best = after
        choices.append(choice)
        if best[workers] >= servers:
            break
    else:
        if best[workers] < servers:
            return None
    found: list[int] = []
    left = workers
    for choice in reversed(choices):
        found.append(int(choice[left]))
        left -= found[-1]
    return found[::-1]
