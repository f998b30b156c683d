"""Random cells of groups whose members report random waits: an independent judge of what a minute below the
promise leads to."""

from random import Random

import pytest

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.groups import GroupDecided, GroupDissolved
from penstock.model.decisions.ledger_events import JobPreempted, PlacementDecided
from penstock.model.nouns.transitions import JobStatus
from tests.unit.ledger.groups.test_group_promises import COMPUTER, READER, Cell

MINUTE_MS = 60_000
DAY_MS = 86_400_000
STEPS = 160


class Judge:
    """Its own account of who is in which group, with which promise, and since when it has less."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.promised: dict[str, float] = {}
        self.speeds: dict[str, float] = {}
        self.short_ms: dict[str, int] = {}
        self.apart: dict[frozenset[str], int] = {}
        self.dissolved = self.formed = 0
        self._read = 0

    def reported(self, job_id: str, speed: float) -> None:
        """Before the placer gets it."""
        if self.cell.job(job_id).sharing.group:
            self.speeds[job_id] = speed
            self._compare(job_id)

    def _compare(self, job_id: str) -> None:
        if self.speeds.get(job_id, 1.0) * 1.25 < self.promised.get(job_id, 0.0):
            self.short_ms.setdefault(job_id, self.cell.now_ms)
        else:
            self.short_ms.pop(job_id, None)

    def watch(self) -> None:
        """The facts since the last look."""
        for record in self.cell.records[self._read :]:
            now_ms, facts = record
            preempted = {fact.job_id for fact in facts if isinstance(fact, JobPreempted)}
            for fact in facts:
                if isinstance(fact, GroupDecided):
                    self._decided(fact, now_ms)
                if isinstance(fact, GroupDissolved):
                    self.dissolved += 1
                    assert preempted >= set(fact.leaves)
                    for short in fact.short:
                        assert now_ms >= self.short_ms[short.job_id]
                    assert any(now_ms - self.short_ms[one.job_id] >= MINUTE_MS for one in fact.short)
                    assert set(fact.leaves) < set(fact.job_ids)
                    stays = set(fact.job_ids) - set(fact.leaves)
                    assert {one.job_id for one in fact.short} & (stays | set(fact.leaves))
                    for pair in fact.apart:
                        self.apart[frozenset((pair.one, pair.other))] = now_ms + DAY_MS
                if isinstance(fact, PlacementDecided) and not fact.group:
                    self.speeds.pop(fact.job_id, None)
        self._read = len(self.cell.records)
        self._left()

    def _decided(self, fact: GroupDecided, now_ms: int) -> None:
        self.formed += 1
        kinds = [f"vision {self.cell.job(job_id).spec.name} 0 1" for job_id in fact.job_ids]
        for number, one in enumerate(kinds):
            for other in kinds[:number]:
                assert self.apart.get(frozenset((one, other)), 0) <= now_ms, "kinds apart are grouped"
        assert fact.turns is not None
        self.promised |= dict(zip(fact.turns.job_ids, fact.turns.speeds, strict=True))
        for job_id in fact.job_ids:
            self._compare(job_id)

    def _left(self) -> None:
        for job_id in list(self.speeds):
            job = self.cell.state.jobs.get(job_id)
            if job is None or not job.sharing.group:
                self.speeds.pop(job_id)
                self.short_ms.pop(job_id, None)

    def nobody_is_harmed_for_long(self) -> None:
        """Of any group of which nobody is being stopped."""
        for members in self.cell.state.groups.values():
            if any(job.status is not JobStatus.RUNNING for job in members.values()):
                continue
            for job_id in members:
                since_ms = self.short_ms.get(job_id, self.cell.now_ms)
                assert self.cell.now_ms - since_ms <= 2 * MINUTE_MS + 2_000, (
                    job_id,
                    self.cell.now_ms - since_ms,
                )


class Recorded(Cell):
    """`records`: time and facts of each."""

    def __init__(self) -> None:
        self.records: list[tuple[int, list[object]]] = []
        super().__init__()

    def feed(self, event: object):  # type: ignore[no-untyped-def]
        step = super().feed(event)
        self.records.append((self.now_ms, list(step.facts)))
        return step


@pytest.mark.parametrize("seed", range(5))
def test_whoever_waits_how_long_no_member_is_harmed_for_long_and_no_group_ends_in_vain(seed: int) -> None:
    """One GPU, jobs of six kinds that save; they join, wait, recover, end and come again, for days."""
    chance, cell = Random(f"promises {seed}"), Recorded()
    judge, number = Judge(cell), 0
    for _ in range(STEPS):
        live = list(cell.state.jobs)
        match chance.randrange(7):
            case 0 if len(live) < 6:
                number += 1
                kind = chance.randrange(6)
                cell.enter(f"j{number}", (READER, COMPUTER)[kind % 2], name=f"kind-{kind}")
            case 1 | 2:
                runs = [job.job_id for job in cell.state.holding.values() if job.status is JobStatus.RUNNING]
                waits = [job_id for job_id in cell.state.queue.values() if cell.job(job_id).attempt < 9]
                if runs and waits and len(runs) < 4:
                    cell.group(*runs, chance.choice(waits), speed=chance.choice((0.2, 0.4, 0.6)))
            case 3 | 4:
                for members in list(cell.state.groups.values()):
                    job_id = chance.choice(sorted(members))
                    if cell.job(job_id).status is JobStatus.RUNNING:
                        speed = chance.choice((0.01, 0.1, 0.3, 0.5, 0.9))
                        judge.reported(job_id, speed)
                        cell.reports(job_id, speed)
            case 5:
                for job in list(cell.state.stopping.values()):
                    cell.ends(job.job_id)
                for job_id in [job_id for job_id in live if chance.random() < 0.1]:
                    if cell.state.jobs[job_id].status is JobStatus.RUNNING:
                        for task_id in list(cell.job(job_id).tasks):
                            cell.exit(task_id)
            case _:
                cell.passes(chance.choice((1_000, 20_000, 45_000, 90_000, DAY_MS // 10)))
        for job in list(cell.state.holding.values()):
            if job.status is JobStatus.LAUNCHING:
                cell.start(job.job_id)
        judge.watch()
        for _ in range(3):
            cell.passes(MINUTE_MS)
            judge.watch()
        judge.nobody_is_harmed_for_long()
    assert judge.formed > 5
    assert judge.dissolved > 2
    followed = dump(cell.follower.state)
    assert dump(load(followed)) == followed
