"""Who held the same GPUs and took turns, and when: folded from a ledger beside the bars of a Gantt chart.

A sharing lasts from one change of a group's members to the next. In the chart its members lie beside each other, each on its part of the GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ledger.state import CellState
from penstock.model.groups import Turns
from penstock.model.types import StageTimes
from penstock.policies.interleaving import RESOURCES, times_of

ALONE = -1


@dataclass(slots=True)
class Sharing:
    """Two or more jobs on the same GPUs; ms as in a timeline."""

    group_id: str
    members: tuple[str, ...]
    """Ids; in the order of the rotation where there is one."""
    turns: Turns | None
    """None: nobody predicted any."""
    stages: tuple[StageTimes | None, ...]
    """Of each member when it began."""
    start_ms: int
    end_ms: int | None = None
    """None: it lasts."""

    def lasted_ms(self, now_ms: int) -> int:
        return (now_ms if self.end_ms is None else self.end_ms) - self.start_ms


class Piece(NamedTuple):
    """A part of the time for which a task holds its GPUs. `sharing`: `ALONE`, or its place in `Sharings.found`; then the task has
    the part `place` of `parts`, counted from 0."""

    start_ms: int
    end_ms: int
    sharing: int
    place: int
    parts: int


@dataclass(slots=True)
class Sharings:
    """`note` after each fact that may change a group."""

    found: list[Sharing] = field(default_factory=list)
    _open: dict[str, int] = field(default_factory=dict)
    """Group → its place in `found`."""
    _of_job: dict[str, list[int]] = field(default_factory=dict)

    def note(self, state: CellState, group_id: str, now_ms: int) -> None:
        """Ends what has changed, and begins what is there now."""
        jobs = state.groups.get(group_id, {})
        turns = next((job.turns for job in jobs.values() if job.turns is not None), None)
        members = tuple(jobs) if turns is None or set(turns.job_ids) != set(jobs) else turns.job_ids
        at = self._open.get(group_id)
        if at is not None:
            last = self.found[at]
            if (last.members, last.turns) == (members, turns):
                return
            last.end_ms = now_ms
            del self._open[group_id]
        if len(members) < 2:
            return
        stages = tuple(
            None if (estimate := jobs[job_id].estimate) is None else estimate.stages for job_id in members
        )
        self._open[group_id] = len(self.found)
        for job_id in members:
            self._of_job.setdefault(job_id, []).append(len(self.found))
        self.found.append(Sharing(group_id, members, turns, stages, now_ms))

    def pieces(self, job_id: str, start_ms: int, end_ms: int) -> Iterator[Piece]:
        """Of a task that holds its GPUs for this time, in order, without gaps."""
        at_ms = start_ms
        for number in self._of_job.get(job_id, ()):
            sharing = self.found[number]
            begins = max(at_ms, sharing.start_ms)
            ends = end_ms if sharing.end_ms is None else min(end_ms, sharing.end_ms)
            if begins >= ends:
                continue
            if at_ms < begins:
                yield Piece(at_ms, begins, ALONE, 0, 1)
            yield Piece(begins, ends, number, sharing.members.index(job_id), len(sharing.members))
            at_ms = ends
        if at_ms < end_ms or start_ms == end_ms:
            yield Piece(at_ms, end_ms, ALONE, 0, 1)


def longest(sharings: Sequence[Sharing], now_ms: int, count: int) -> list[Sharing]:
    """Those of which turns can be drawn; each group of the same kinds of members once."""
    drawn: dict[tuple[object, ...], Sharing] = {}
    for sharing in sorted(sharings, key=lambda one: -one.lasted_ms(now_ms)):
        turns, stages = sharing.turns, [one for one in sharing.stages if one is not None]
        used = any(sum(times_of(one)[:RESOURCES]) > 0 for one in stages)
        if turns is not None and used and len(stages) == len(sharing.members) == len(turns.job_ids):
            drawn.setdefault(sharing.stages, sharing)
    return list(drawn.values())[:count]
