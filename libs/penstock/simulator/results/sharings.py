"""Intervals in which jobs shared GPUs and took turns: folded from a ledger beside the bars of a Gantt chart.

A sharing lasts from one change of a group's members to the next. In the chart its members are beside each
other, each on a part of the GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.ledger.state.state import CellState
from penstock.model.decisions.groups import Turns
from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.interleaving import RESOURCES, times_of

ALONE = -1


@dataclass(slots=True)
class Sharing:
    """Two or more jobs on the same GPUs; ms as in a timeline."""

    group_id: str
    members: tuple[str, ...]
    """Job ids; in the order of the rotation if there is one."""
    turns: Turns | None
    """None: no turns were predicted."""
    stages: tuple[StageTimes | None, ...]
    """Stage times of each member when the sharing began."""
    start_ms: int
    end_ms: int | None = None
    """None: it has not ended."""

    def lasted_ms(self, now_ms: int) -> int:
        return (now_ms if self.end_ms is None else self.end_ms) - self.start_ms


class Piece(NamedTuple):
    """A part of the time in which a task holds its GPUs. `sharing`: `ALONE`, or an index of `Sharings.found`;
    then the task has the part `place` of `parts`, counted from 0."""

    start_ms: int
    end_ms: int
    sharing: int
    place: int
    parts: int


@dataclass(slots=True)
class Sharings:
    """All sharings. Call `note` after each event that may change a group."""

    found: list[Sharing] = field(default_factory=list)
    _open: dict[str, int] = field(default_factory=dict)
    """Group → its index in `found`."""
    _of_job: dict[str, list[int]] = field(default_factory=dict)

    def note(self, state: CellState, group_id: str, now_ms: int) -> None:
        """Ends the group's present sharing if it has changed, and begins the new one."""
        jobs = state.groups.get(group_id, {})
        turns = next((job.sharing.turns for job in jobs.values() if job.sharing.turns is not None), None)
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
        """Pieces of a task that holds its GPUs for this time, in order, without gaps."""
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
    """The longest sharings with data for drawing turns; equal stage times of the members only once."""
    by_stages: dict[tuple[object, ...], Sharing] = {}
    for sharing in sorted(sharings, key=lambda one: -one.lasted_ms(now_ms)):
        turns, stages = sharing.turns, [one for one in sharing.stages if one is not None]
        used = any(sum(times_of(one)[:RESOURCES]) > 0 for one in stages)
        if turns is not None and used and len(stages) == len(sharing.members) == len(turns.job_ids):
            by_stages.setdefault(sharing.stages, sharing)
    return list(by_stages.values())[:count]
