"""Snapshots: a fold that was put away and taken out again goes on as if nothing had happened."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import FOLD_VERSION
from penstock.ledger.record.record import RawRecord
from penstock.ledger.replica import snapshot
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import Damaged, dump, format_id, load
from penstock.ledger.state.job.ending import NOT_EXITED
from penstock.ledger.state.job.following import NOT_TIED
from penstock.ledger.state.job.moves import NO_MOVES
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_spec import JobSpec
from tests.support.cluster.hand_placer import HandPlacer, node_spec


def random_ledger(seed: int, steps: int = 60) -> HandPlacer:
    """A busy small cell."""
    placer = HandPlacer()
    placer.join(node_spec("n0", 4), node_spec("n1", 2), node_spec("n2", 1))
    placer.wander(np.random.default_rng(seed), steps)
    return placer


def folded(values: list[bytes]) -> Replica:
    replica = Replica()
    for offset, value in enumerate(values):
        assert isinstance(replica.take(value, offset), RawRecord)
    return replica


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.floats(0, 1))
def test_a_restart_from_a_snapshot_changes_nothing(seed: int, cut: float) -> None:
    """A projector is stopped at some record and starts again from its snapshot: every later state is the
    same."""
    values = random_ledger(seed).values
    at = int(cut * len(values))
    before = folded(values[:at])
    body = dump(before.state)
    restored = Replica(load(body), before.head, before.offset)
    assert dump(restored.state) == body
    assert check(restored.state) == check(before.state) == []
    assert restored.state.next_timer() == before.state.next_timer()
    for offset, value in enumerate(values[at:], start=at):
        assert before.take(value, offset) is not None
        assert restored.take(value, offset) is not None
        assert dump(restored.state) == dump(before.state)
        assert list(restored.state.queue.items()) == list(before.state.queue.items())
    assert check(restored.state) == []


def test_the_placers_own_state_gives_the_same_bytes_as_a_followers() -> None:
    """The placer folds the models that it made, a follower folds what it read: their snapshots are equal."""
    placer = random_ledger(7, steps=200)
    assert dump(placer.replica.state) == dump(folded(placer.values).state)


def test_what_most_jobs_have_in_common_is_read_once() -> None:
    """Ten thousand waiting jobs that were never stopped, moved or grouped: their parts are the same objects
    after a restart, as they were before."""
    for state in (placer := random_ledger(7)).replica.state, load(dump(placer.replica.state)):
        jobs = list(state.jobs.values())
        tasks = [task for job in jobs for task in job.tasks.values()]
        assert len(jobs) > 3
        assert all(job.following is NOT_TIED and job.moves is NO_MOVES for job in jobs)
        assert any(task.exit is NOT_EXITED for task in tasks)


def test_an_empty_cell_has_a_snapshot_too() -> None:
    assert dump(load(dump(CellState()))) == dump(CellState())


@pytest.mark.parametrize("harm", [b"", b"{}", b"null", b"[1]", b'{"seq": "x"}'])
def test_what_is_no_snapshot_is_refused(harm: bytes) -> None:
    """A disk returned something else: the caller must learn that, and never get half a state."""
    with pytest.raises(Damaged):
        load(harm)


def large() -> Replica:
    """With mappings that are written in several slices."""
    placer = HandPlacer()
    placer.join(*(node_spec(f"n{number}", 1) for number in range(2 * snapshot.SLICE + 3)))
    spec = JobSpec(command=("true",), queue_timeout_ms=1_000_000, env={"text": '\n"{}\n'})
    for number in range(3 * snapshot.SLICE):
        placer.submit(f"j{number}", gpus=2, spec=spec)
    return placer.replica


def test_slices_are_the_same_json() -> None:
    """A large cell's snapshot is written and read piece by piece: nothing depends on where the pieces end."""
    state = large().state
    body = dump(state)
    assert body.count(b"\n") > 6, "nothing was sliced, so nothing is shown"
    assert dump(load(body)) == body
    whole = msgspec.json.encode(msgspec.json.decode(body))
    assert dump(load(whole)) == body, "as the version before wrote it"
    assert list(load(body).queue.items()) == list(state.queue.items())
    lines = body.split(b"\n")
    for line in (3, len(lines) // 2):
        with pytest.raises(Damaged):
            load(b"\n".join([*lines[:line], lines[line][:-5], *lines[line + 1 :]]))


def test_a_cut_snapshot_is_refused() -> None:
    body = dump(random_ledger(3).replica.state)
    with pytest.raises(Damaged):
        load(body[: len(body) // 2])


def test_the_format_names_the_shape_and_the_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions whose states have other fields, or that fold differently, never read each other's
    snapshots."""
    ours = format_id()
    assert (ours, len(ours)) == (format_id(), len(f"{FOLD_VERSION}-") + 16)
    monkeypatch.setattr(snapshot, "FOLD_VERSION", FOLD_VERSION + 1)
    format_id.cache_clear()
    assert format_id() not in (ours, "")
    monkeypatch.undo()
    format_id.cache_clear()
    assert format_id() == ours
