"""What-ifs of the fair order: asked again and again while jobs start and end, it is the order that its rules
give, worked out from nothing each time."""

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import Event
from penstock.scheduling.order import fair
from penstock.scheduling.order.deadline_order import DeadlineOrder
from penstock.scheduling.order.fair import FairResponse
from penstock.scheduling.order.shares import (
    NOTHING,
    Amounts,
    amounts,
    at_least,
    capacity,
    dominant,
    leased,
    plus,
)
from penstock.scheduling.place.moldable import ShortestStep
from penstock.scheduling.place.together import Together
from penstock.scheduling.stages.protocols import Turns
from penstock_services.placer.core.step import Step
from tests.support.cluster.random_cell import RandomCell


def plain(
    state: CellState, waiting: list[JobState], holding: list[JobState], at_ms: int, pressing: list[JobState]
) -> Turns:
    """The order as the docstrings of `fair` and `deadline_order` have it."""
    gone = state.jobs.keys() - {job.job_id for job in holding}
    held: dict[str, Amounts] = {}

    def add(job: JobState, more: Amounts) -> None:
        held[job.spec.owner] = plus(held.get(job.spec.owner, NOTHING), more)

    for job in holding:
        add(job, leased(state, job, gone) if job.order in state.holding else amounts(job))
    left = {job.job_id: job for job in sorted(waiting, key=lambda job: job.order)}

    def limit() -> tuple[Amounts, float]:
        tenants = {owner for owner, amount in held.items() if any(amount)}
        tenants |= {job.spec.owner for job in left.values()}
        return at_least(capacity(state), held), 1.0 / max(1, len(tenants))

    total, share = limit()
    for job in pressing:
        if job.job_id in left and dominant(held.get(job.spec.owner, NOTHING), total) < share:
            del left[job.job_id]
            if (yield job):
                add(job, amounts(job))
    total, share = limit()
    rows: dict[fair.Row, list[JobState]] = {}
    for job in left.values():
        rows.setdefault(fair._row(state, job)[0], []).append(job)

    def key(job: JobState, row: fair.Row) -> tuple[bool, float, int]:
        ratio = ((at_ms - job.submitted_ms) / 1_000 + row[3]) / row[3]
        large = job.workers * job.demand.worker.gpus >= fair.LARGE_GPUS
        reached = dominant(held.get(row[0], NOTHING), total) >= share
        return reached and not (large and ratio >= fair.PATIENCE), -ratio, job.order

    while rows:
        top = {owner: max(row[1] for row in rows if row[0] == owner) for owner, *_ in rows}
        firsts = ((key(jobs[0], row), row) for row, jobs in rows.items() if row[1] == top[row[0]])
        row = min(firsts, key=lambda one: one[0])[1]
        job = rows[row].pop(0)
        started = yield job
        if started:
            add(job, amounts(job))
        if not started or not rows[row]:
            del rows[row]


class Foreseen(RandomCell):
    """Now and then somebody asks for a forecast: at a few later times some jobs end, and others start."""

    def __init__(self, seed: int, jobs: int) -> None:
        self.seen: Counter[str] = Counter()
        self.fair = FairResponse()
        self.stage = DeadlineOrder("penstock", Together("penstock", 0.0), self.fair, ShortestStep())
        super().__init__(seed, PlacerSettings(profile="penstock"), jobs)

    def feed(self, event: Event) -> Step:
        step = super().feed(event)
        if self.head.seq % 2 == 0 and self.state.queue:
            self.ask(Random(self.head.seq))
        return step

    def ask(self, random: Random) -> None:
        """One forecast: of the whole queue, or of some jobs, one of which has a shape of its own."""
        state = self.state
        waiting = [state.jobs[job_id] for job_id in state.queue.values()]
        whole = random.random() < 0.5
        if not whole:
            waiting = random.sample(waiting, min(len(waiting), random.choice((2, 4, 8, 60))))
            waiting[0] = waiting[0].shaped(waiting[0].workers + 1)
        ranking = self.stage.ranking(state, None if whole else waiting)
        holding, at_ms = list(state.holding.values()), self.now_ms
        for _ in range(random.randint(1, 5)):
            pressing = list(self.stage._pressing(state, [job for job in waiting if job.spec.timed]))
            self.seen["pressing"] += bool(pressing)
            rate = random.choice((0.0, 0.3, 1.0))
            right, shown = plain(state, waiting, holding, at_ms, pressing), ranking.turns(at_ms)
            for job in list(tried(right, shown, random, rate)):
                waiting.remove(job)
                holding.append(job)
                self.seen["starts"] += 1
            for job in random.sample(holding, random.choice((0, len(holding) // 2, len(holding)))):
                holding.remove(job)
                ranking.ends(job)
                self.seen["ends"] += 1
            at_ms += random.choice((0, 1_000, 10_000_000))
            self.seen["asked"] += 1


def tried(right: Turns, shown: Turns, random: Random, rate: float) -> Iterator[JobState]:
    """The jobs that start, at this rate."""
    expected, found = next(right, None), next(shown, None)
    while expected is not None:
        assert found is expected
        starts = random.random() < rate
        if starts:
            yield found
        expected, found = sent(right, starts), sent(shown, starts)
    assert found is None


def sent(turns: Turns, starts: bool) -> JobState | None:
    try:
        return turns.send(starts)
    except StopIteration:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_an_order_that_is_kept_is_the_one_made_from_nothing(seed: int) -> None:
    """Three tenants, urgent jobs, deadlines, priorities and gangs of all sizes: whatever starts and ends in
    the what-if, whoever is next is the one that the rules name."""
    cell = Foreseen(seed, 60)
    cell.run()
    assert cell.seen["asked"] > 20
    assert min(cell.seen[name] for name in ("pressing", "starts", "ends")) > 5
