"""Wherever the estimator begins, it says the same: at the ledger's first record, at a snapshot of the cell,
in the middle of the events that a gateway streams."""

from collections.abc import Sequence
from functools import cache

import pytest

from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import NodeLost
from penstock.model.inputs.external_events import NodeChanged
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.topics import Topic
from penstock_services.estimator.core.fold.from_snapshot import begin_at, recall, recall_from
from penstock_services.estimator.core.fold.live import LiveJob
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.core.fold.streamed import Streamed
from penstock_services.estimator.core.records.runs import Card
from tests.support.cluster.driver import node_spec
from tests.support.cluster.random_cell import RandomCell
from tests.unit.estimator.service.test_estimator import ids

SEEDS = (*range(60, 72), 0, 53)  # the last two: jobs that back off between attempts
PARTS = (0.1, 0.3, 0.5)
"""Of a ledger, where the estimator begins."""


class Kept(RandomCell):
    """Some inputs are of any kind, with numbers at the ends of their ranges; every reader agrees with the
    placer."""

    def __init__(self, seed: int) -> None:
        self.values: list[bytes] = []
        super().__init__(seed, PlacerSettings(profile="penstock", seed=1), 40, arrives=0.2, extremes=0.1)
        self.run()
        assert self.readers is not None
        self.readers.agree_with(self.state)

    def written(self, value: bytes) -> None:
        super().written(value)
        self.values.append(value)


@cache
def ledger(seed: int) -> Sequence[bytes]:
    return Kept(seed).values


def begun(values: Sequence[bytes]) -> State:
    """At a snapshot of the cell after these records; what they say of running jobs is recalled."""
    replica, state = Replica(), State(Topic.JOBS, 0)
    for offset, value in enumerate(values):
        replica.take(value, offset)
    begin_at(state, Replica(load(dump(replica.state)), replica.head, replica.offset, replica.head_offset))
    recall(state, values[recall_from(state, len(values)) :])
    return state


def known(live: LiveJob) -> object:
    """What a snapshot tells of a job, too."""
    progress = live.progress
    if progress is None or not live.job.tasks:
        return live.job.awaited_estimate
    tasks, told = list(progress.tasks), (progress.done, progress.total, progress.published)
    return live.info, live.allocation, progress.attempt, progress.placed, progress.usual, tasks, told


@pytest.mark.parametrize("seed", SEEDS)
def test_an_estimator_that_begins_at_a_snapshot_goes_on_as_if_it_had_read_all(seed: int) -> None:
    """It is restarted in a random cell: users cancel and hold, nodes fall silent, jobs are preempted. From
    then on it estimates the same jobs, and what it learns from those submitted later is the same, number by
    number."""
    values = ledger(seed)
    for part in PARTS:
        at = int(part * len(values))
        whole, later = State(Topic.JOBS, 0), begun(values[:at])
        for offset, value in enumerate(values[:at]):
            whole.fold(value, offset)
        before, whole.finished = set(whole.live), []
        for offset, value in enumerate(values[at:], start=at):
            for job_id, live in whole.live.items():
                assert known(later.live[job_id]) == known(live), f"{job_id} before record {offset + 1}"
            for state in (whole, later):
                assert state.fold(value, offset)
            assert ids(whole.unestimated()) == ids(later.unestimated())
            assert whole.jobs_offset == later.jobs_offset
        assert dump(whole.cell) == dump(later.cell)
        runs = [
            {run.job_id: repr(run) for run in state.finished if run.job_id not in before}
            for state in (whole, later)
        ]
        assert runs[0] == runs[1]
        assert runs[0] or part > PARTS[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_on_events_whose_first_ones_are_gone_counts_the_jobs_that_came_later(seed: int) -> None:
    """The gateway stores a million records. Nodes joined long before: their cards are unknown."""
    values = ledger(seed)
    whole, replica = State(Topic.JOBS, 0), Replica()
    events = []
    for offset, value in enumerate(values):
        whole.fold(value, offset)
        record = replica.take(value, offset)
        assert record is not None
        events += [(record.seq, record.now_ms, fact) for fact in record.events(offset)]
    for part in (0.0, *PARTS):
        state, since = State(Topic.JOBS, 0), int(part * len(values))
        reader = Streamed(state)
        for seq, now_ms, fact in events:
            if seq > since:
                reader.replica.take_fact(seq, now_ms, fact, reader.see)
        found = [(run.job_id, run.info, run.measured.run_ms) for run in state.finished]
        all_of_them = [(run.job_id, run.info, run.measured.run_ms) for run in whole.finished]
        late = {job_id for job_id, _, _ in found}
        assert repr(found) == repr([one for one in all_of_them if one[0] in late])
        assert len(found) == len(all_of_them) or part > 0
        assert found or part > PARTS[0]


def test_a_node_that_changes_is_known_from_then_on() -> None:
    """It joined before the first event that is still stored, and got other cards since."""
    state = State(Topic.JOBS, 0)
    reader = Streamed(state)
    changed = NodeChanged(node=node_spec("n1", 2, model="T4", memory_mib=15_360))
    reader.replica.take_fact(70, 1_000, changed, reader.see)
    assert state.nodes.cards() == (Card("T4", 15_360),)
    reader.replica.take_fact(71, 2_000, NodeLost(node_id="elsewhere"), reader.see)
    assert list(state.cell.nodes) == ["n1"]
