"""Gangs take turns by their rank 0: no deadlock is reachable, as it is where each rank takes turns on its own
node. And which gangs cannot."""

from collections.abc import Sequence
from itertools import product

import pytest

from penstock.scheduling.groups.gang_turns import why_no_turns

Act = tuple[str, str]
MEET, CPU, GPU = ("meet", ""), ("take", "cpu"), ("take", "gpu")
LEAVE = ("leave", "")
PROGRAMS: Sequence[tuple[Act, ...]] = (
    (GPU, MEET, LEAVE),  # a collective inside of a stage
    (CPU, GPU, MEET, LEAVE),  # the next turn is taken once the one before is left
    (CPU, MEET, GPU, MEET, LEAVE),
    (GPU, CPU, MEET, GPU, LEAVE, MEET),
)


def deadlocks(
    gangs: Sequence[tuple[Act, ...]], nodes: int, *, everybody: bool = False, follow: bool = False
) -> bool:
    """Whether some order of events leads to where nobody can go on. Each gang has a rank per node and all of
    them run its program, whose turns rank 0 takes for all, or `everybody` on its own node. A turn that is
    held is left before another is waited for. `follow`: other ranks enter a stage when rank 0 has, as those
    on its node do."""
    ranks = list(product(range(len(gangs)), range(nodes)))
    first = tuple(0 for _ in ranks), tuple("" for _ in ranks), tuple(False for _ in ranks)
    seen, todo = {first}, [first]
    while todo:
        places, held, left = todo.pop()
        moves = []
        for number, (gang, node) in enumerate(ranks):
            if places[number] == len(gangs[gang]):
                continue
            kind, what = gangs[gang][places[number]]
            takes = everybody or node == 0
            if kind == "meet":
                fellows = [other for other, (their, _) in enumerate(ranks) if their == gang]
                if number == fellows[0] and len({places[other] for other in fellows}) == 1:
                    moves.append((dict.fromkeys(fellows, places[number] + 1), {}, {}))
            elif not takes:
                chief = ranks.index((gang, 0))
                if not follow or kind == "leave" or places[chief] > places[number]:
                    moves.append(({number: places[number] + 1}, {}, {}))
            elif kind == "leave" or not left[number]:
                after = places[number] + 1 if kind == "leave" else places[number]
                moves.append(({number: after}, {number: ""}, {number: kind != "leave"}))
            elif not any(
                held[other] == what and ranks[other][1] == node
                for other in range(len(ranks))
                if other != number
            ):
                moves.append(({number: places[number] + 1}, {number: what}, {number: False}))
        if not moves and any(places[n] < len(gangs[gang]) for n, (gang, _) in enumerate(ranks)):
            return True
        for new_places, new_held, new_left in moves:
            state = _with(places, new_places), _with(held, new_held), _with(left, new_left)
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return False


def _with(values: tuple, changes: dict) -> tuple:  # type: ignore[type-arg]
    return tuple(changes.get(number, value) for number, value in enumerate(values))


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_gangs_whose_chiefs_take_turns_never_deadlock(nodes: int) -> None:
    """All orders of events of all pairs of programs, with one rank and with several."""
    for pair, follow in product(product(PROGRAMS, repeat=2), (False, True)):
        assert not deadlocks(pair, nodes, follow=follow), (pair, follow)


def test_gangs_that_take_turns_on_each_of_their_nodes_can_deadlock() -> None:
    """One has the first node's GPU, the other the second node's; each waits for its other half."""
    assert deadlocks([(GPU, MEET, LEAVE)] * 2, 2, everybody=True)
    assert not deadlocks([(GPU, MEET, LEAVE)] * 2, 1, everybody=True)


def test_which_gangs_can_take_turns() -> None:
    assert why_no_turns(1, 0, ["n1", "n1"]) is None
    assert why_no_turns(8, 0, ["n1", "n1", "n1"]) is None, (
        "rank 0 takes turns for all, on whatever nodes they are"
    )
    assert why_no_turns(1, 2, ["n1"]) is None, "the one worker is the chief"
    refused = why_no_turns(3, 1, ["n1"])
    assert refused is not None
    assert "3 workers do not wait for each other" in refused
    apart = why_no_turns(2, 0, ["n2", "n1", "n2"])
    assert apart is not None
    assert "n2, n1" in apart
