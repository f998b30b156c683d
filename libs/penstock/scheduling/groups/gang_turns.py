"""Deadlock avoidance for groups of gangs: which gangs can take turns at the resources of their GPUs, so that
they may be members of a group.

In a gang only rank 0 takes turns (`penstock.sdk.sharing.turns`), for the whole gang. Members of a group are
on the same nodes rank by rank, so their ranks 0 are on one node, and use one folder: one queue per resource
for the whole group, whatever nodes it is on. So no order of locks over nodes is needed. A gang holds at most
one turn, none while it waits, and its other ranks hold none; those on the chief's node follow it through the
stages, those elsewhere run ahead up to their next collective. So no rank for which others wait is waiting for
a turn itself: there is no cycle.

Ideal: each rank takes turns on its own node. Departure, since this can deadlock: two gangs over two nodes
could hold one node each and wait for the other, while their workers wait for each other in collectives
(`tests/unit/scheduling/groups/test_gang_turns.py` shows it).
"""

from collections.abc import Sequence


def why_no_turns(workers: int, parameter_servers: int, chiefs: Sequence[str]) -> str | None:
    """Why gangs of this shape cannot take turns; None: they can. `chiefs`: the node of each member's rank 0;
    a single node where there is one member, or where they are not known yet. Text for users, without the
    job's name. O(members)."""
    if workers > 1 and parameter_servers:
        return (
            f"its {workers} workers do not wait for each other at parameter servers, so rank 0 cannot "
            "take turns for them"
        )
    if len(set(chiefs)) > 1:
        return f"the ranks 0 are on {', '.join(dict.fromkeys(chiefs))}: members take turns on one node"
    return None
