"""Stories of checkpoints in the ledger: reported by nodes, kept per job, carried by the next attempt's
start."""

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.ledger import views
from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.adjustments import CheckpointDecided
from penstock.model.decisions.orders import CheckpointSource, CheckpointTask, HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    JobCancelRequested,
    JobCheckpointRequested,
    NodeJoined,
    NodeLeft,
    TaskCheckpointed,
)
from penstock.model.inputs.saves import SaveRefused
from penstock.model.nouns.nodes import LogServer
from penstock_services.placer.core.orders import orders_of, start_orders
from tests.support.cluster.driver import CellDriver, estimate, job_spec, kinds, node_spec

SAVES = job_spec(attempts=3, checkpoint="sdk")


@pytest.fixture
def cell() -> CellDriver:
    """Two nodes of two GPUs; job `a` runs on the first."""
    driver = CellDriver()
    driver.join(node_spec("n1", 2), node_spec("n2", 2))
    driver.submit("a", SAVES)
    driver.start("a")
    return driver


def saved(cell: CellDriver, task_id: str, iteration: int, **more: Any) -> TaskCheckpointed:
    job_id, attempt, _ = task_id.rsplit(".", 2)
    job = cell.job(job_id)
    name = f"attempt-{attempt}-iteration-{iteration}"
    fields: dict[str, Any] = {
        "node_id": job.tasks[task_id].place.node_id,
        "task_id": task_id,
        "token": job.token,
        "at_ms": 5,
        "path": f"/state/checkpoints/{job_id}/{name}",
        "iteration": iteration,
        "size_bytes": 7,
        "save_ms": 250,
    }
    return TaskCheckpointed(**fields | more)


def starts(cell: CellDriver) -> dict[str, str | None]:
    """Task → what its start order says of a checkpoint."""
    return {order.task_id: order.checkpoint for order in cell.orders() if isinstance(order, StartTask)}


def again(cell: CellDriver, job_id: str) -> None:
    """Each task of its attempt fails; the next attempt is placed."""
    for task_id in list(cell.job(job_id).tasks):
        cell.exit(task_id, 1)
    cell.at(cell.state.now_ms + 100_000)


def test_the_next_attempt_on_this_node_starts_at_the_latest_checkpoint(cell: CellDriver) -> None:
    """It saved twice, then failed. A snapshot in between loses nothing."""
    cell.feed(saved(cell, "a.1.w0", 100))
    assert kinds(cell.feed(saved(cell, "a.1.w0", 250))) == ["task.checkpointed"]
    found = load(dump(cell.state)).jobs["a"].saving.checkpoint
    assert found is not None
    assert found == cell.job("a").saving.checkpoint
    assert (found.iteration, found.node_id, found.attempt, found.save_ms) == (250, "n1", 1, 250)
    again(cell, "a")
    assert starts(cell) == {"a.2.w0": "attempt-1-iteration-250"}


@pytest.mark.parametrize(("shared", "carried"), [(True, "attempt-1-iteration-100"), (False, "")])
def test_on_another_node_it_goes_on_only_where_the_folder_is_shared(
    cell: CellDriver, shared: bool, carried: str
) -> None:
    """Meanwhile its place was taken. Without a shared folder the start says so, and the job begins at 0."""
    cell.feed(saved(cell, "a.1.w0", 100, shared=shared))
    cell.exit("a.1.w0", 1)
    for other in "bc":
        cell.submit(other)
    assert {cell.job(other).tasks[f"{other}.1.w0"].place.node_id for other in "bc"} == {"n1"}
    cell.at(cell.state.now_ms + 100_000)
    assert cell.job("a").tasks["a.2.w0"].place.node_id == "n2"
    assert starts(cell)["a.2.w0"] == carried


def moved(serves: bool = True) -> CellDriver:
    """Job `a` has saved on n1 and starts again on n2, since others took its place. `serves`: n1 hands
    checkpoints over."""
    cell = CellDriver()
    for number, name in enumerate(("n1", "n2")):
        logs = LogServer(port=4_000 + number, key="0" * 16) if serves else None
        spec = replace(node_spec(name, 2), address=f"10.0.0.{number + 1}", logs=logs)
        cell.feed(NodeJoined(node=spec, public_key=str(number) * 86, incarnation=1))
    cell.submit("a", SAVES)
    cell.start("a")
    cell.at(cell.state.now_ms + 60_000)
    cell.feed(saved(cell, "a.1.w0", 100))
    cell.exit("a.1.w0", 1)
    for other in "bc":
        cell.submit(other)
    cell.at(cell.state.now_ms + 100_000)
    assert cell.job("a").tasks["a.2.w0"].place.node_id == "n2"
    return cell


def test_a_job_that_starts_elsewhere_fetches_its_checkpoint_from_where_it_is() -> None:
    """The new node learns whom to ask, the old one who may ask, by the same record; and both again from the
    next placer. What the checkpoint has is not counted as lost."""
    cell = moved()
    [order] = [order for order in cell.orders() if isinstance(order, StartTask) and order.job_id == "a"]
    assert (order.checkpoint, order.checkpoint_from) == (
        "attempt-1-iteration-100",
        CheckpointSource(node_id="n1", address="10.0.0.1", port=4_000, public_key="0" * 86, size_bytes=7),
    )
    [handed] = [order for order in cell.orders() if isinstance(order, HandOverCheckpoint)]
    assert handed == HandOverCheckpoint(
        token=order.token, node_id="n1", job_id="a", attempt=2, to_node="n2", public_key="1" * 86
    )
    assert cell.job("a").saving.kept_ms >= 60_000
    assert start_orders(cell.state, "a", order.token) == [handed, order]
    cell.start("a")
    assert not [order for order in cell.orders() if isinstance(order, HandOverCheckpoint)]


def test_a_gang_that_begins_anew_is_said_to_have_lost_what_it_saved() -> None:
    """Two nodes share no folder, and rank 0's has the checkpoint: the next attempt would start one rank at
    100 and the other at 0. `why` named the checkpoint as if all went on there."""
    cell = CellDriver()
    cell.join(node_spec("n1", 1), node_spec("n2", 1))
    cell.submit("g", job_spec(workers=2, checkpoint="sdk", attempts=2))
    cell.start("g")
    cell.feed(saved(cell, "g.1.w0", 100))
    again(cell, "g")
    row = views.checkpoint(cell.state, cell.job("g"))
    assert row is not None
    assert row["problem"].startswith("its tasks are on n1, n2, and not all of these have it")
    cell.start("g")
    cell.feed(saved(cell, "g.2.w0", 3))
    row = views.checkpoint(cell.state, cell.job("g"))
    assert row is not None
    assert row["problem"] == ""


def test_what_was_fetched_is_where_it_is_from_then_on() -> None:
    """The attempt on n2 fails before it saves. The next one there finds it, and one on n1 would fetch it from
    n2."""
    cell = moved()
    path = "/elsewhere/a/attempt-1-iteration-120"
    job = cell.job("a")
    fetched = CheckpointFetched(
        node_id="n2", task_id="a.2.w0", token=job.token, at_ms=5, from_node="n1", path=path, iteration=120
    )
    assert kinds(cell.feed(fetched)) == ["task.checkpoint_fetched"]
    kept = load(dump(cell.state)).jobs["a"].saving.checkpoint
    assert kept is not None
    assert kept == job.saving.checkpoint
    assert (kept.node_id, kept.path, kept.iteration, kept.fetched_from) == ("n2", path, 120, "n1")
    assert kept.problem == ""
    assert job.saving.kept_ms >= 60_000
    cell.start("a")
    again(cell, "a")
    [order] = [order for order in cell.orders() if isinstance(order, StartTask) and order.job_id == "a"]
    assert (order.node_id, order.checkpoint, order.checkpoint_from) == ("n2", "attempt-1-iteration-120", None)


def test_what_could_not_be_fetched_is_done_again() -> None:
    """The old node's reporter is down. The reason stands with the job; the checkpoint stays known, where it
    is."""
    cell = moved()
    job = cell.job("a")
    failed = CheckpointFetched(
        node_id="n2", task_id="a.2.w0", token=job.token, at_ms=5, from_node="n1", problem="it does not answer"
    )
    cell.feed(failed)
    assert job.saving.kept_ms == 0
    assert job.saving.checkpoint is not None
    assert (job.saving.checkpoint.node_id, job.saving.checkpoint.problem) == ("n1", "it does not answer")
    assert cell.feed(replace(failed, token=1)).reason == "stale_token"
    cell.start("a")
    cell.feed(saved(cell, "a.2.w0", 3))
    assert job.saving.checkpoint.problem == ""


@pytest.mark.parametrize("gone", [True, False])
def test_nothing_is_fetched_where_nobody_can_serve_it(gone: bool) -> None:
    """The old node is proven gone, or serves nothing: the start says so, and what was done is counted
    again."""
    cell = moved(serves=gone)
    if gone:
        for other in "bc":
            cell.feed(JobCancelRequested(job_id=other))
            cell.exit(f"{other}.1.w0", cause="stopped")
        cell.exit("a.2.w0", 1)
        cell.feed(NodeLeft(node_id="n1", boot_id="b1", proof="fenced"))
        cell.at(cell.state.now_ms + 100_000)
    [order] = [order for order in cell.orders() if isinstance(order, StartTask) and order.job_id == "a"]
    assert (order.node_id, order.checkpoint, order.checkpoint_from) == ("n2", "", None)
    assert not [order for order in cell.orders() if isinstance(order, HandOverCheckpoint)]
    assert cell.job("a").saving.kept_ms == 0


def test_a_gang_goes_on_together_or_not_at_all(cell: CellDriver) -> None:
    """Three workers on two nodes: rank 0's checkpoint is on the first, so nobody starts there."""
    cell.submit("g", job_spec(workers=3, attempts=3, checkpoint="sdk"))
    cell.start("g")
    assert {task.place.node_id for task in cell.job("g").tasks.values()} == {"n1", "n2"}
    cell.feed(saved(cell, "g.1.w0", 10))
    again(cell, "g")
    assert set(starts(cell).values()) == {""}
    cell.start("g")
    cell.feed(saved(cell, "g.2.w0", 10, shared=True))
    again(cell, "g")
    assert set(starts(cell).values()) == {"attempt-2-iteration-10"}


def test_a_job_that_does_not_save_in_our_folder_has_none(cell: CellDriver) -> None:
    """Its node makes none: one saves in a place of its own, the other not at all."""
    for kind in ("none", "signal"):
        cell.submit(kind, job_spec(checkpoint=kind))
        assert starts(cell)[f"{kind}.1.w0"] is None


def refused(cell: CellDriver, task_id: str) -> SaveRefused:
    job = cell.job(task_id.partition(".")[0])
    node_id = job.tasks[task_id].place.node_id
    return SaveRefused(node_id=node_id, task_id=task_id, token=job.token, at_ms=5, reason="nobody")


def asks(job_id: str = "a", **more: Any) -> JobCheckpointRequested:
    return JobCheckpointRequested(job_id=job_id, reason="before the upgrade", by="ops/ada", **more)


def saves(cell: CellDriver) -> list[Any]:
    return [order for order in cell.orders() if isinstance(order, CheckpointTask)]


def test_a_job_is_asked_to_save_until_it_has(cell: CellDriver) -> None:
    """An operator is about to upgrade a node. The order is repeated to a reporter that comes back, until a
    checkpoint is reported."""
    step = cell.feed(asks())
    assert kinds(step) == ["job.checkpoint_requested", "checkpoint.decided"]
    decided = step.facts[1]
    assert decided == CheckpointDecided(
        job_id="a", attempt=1, task_id="a.1.w0", node_id="n1", by="ops/ada", reason="before the upgrade"
    )
    (order,) = orders_of(cell.state, decided, cell.state.seq)
    assert order == CheckpointTask(token=cell.state.token, node_id="n1", task_id="a.1.w0")
    assert saves(cell) == [order]
    assert load(dump(cell.state)).jobs["a"].tasks["a.1.w0"].checkpoint_asked is not None
    cell.feed(saved(cell, "a.1.w0", 9))
    assert saves(cell) == []


@pytest.mark.parametrize(("kind", "counts"), [("sdk", False), ("signal", True)])
def test_a_job_whose_node_finds_no_saver_counts_as_one_without_checkpoints(
    cell: CellDriver, kind: str, counts: bool
) -> None:
    """Its script never calls `checkpoint()`. The request is not repeated; a checkpoint, or the next
    attempt, proves the opposite. What saves by itself may do so on SIGTERM alone."""
    cell.submit("b", job_spec(checkpoint=kind, attempts=3))
    cell.start("b")
    cell.feed(asks("b"))
    job = cell.job("b")
    assert job.saves
    step = cell.feed(refused(cell, "b.1.w0"))
    assert step.outcome == "committed"
    assert (job.saves, saves(cell)) == (counts, [])
    assert load(dump(cell.state)).jobs["b"].saves == counts
    cell.feed(saved(cell, "b.1.w0", 9))
    assert job.saves
    cell.feed(refused(cell, "b.1.w0"))
    again(cell, "b")
    assert cell.job("b").saves


def test_who_may_not_or_cannot_save_is_not_asked(cell: CellDriver) -> None:
    """Another tenant asks; a job that does not save, one that waits, one that has ended."""
    cell.submit("none")
    cell.start("none")
    cell.submit("waits", job_spec(workers=8, checkpoint="sdk"))
    for event, reason in (
        (asks(tenant="speech"), "other_tenant"),
        (asks("none"), "saves_nothing"),
        (asks("waits"), "not_running"),
        (asks("ghost"), "unknown_job"),
    ):
        assert cell.feed(event).reason == reason
    cell.exit("a.1.w0")
    assert cell.feed(asks()).reason == "job_ended"
    assert saves(cell) == []


def test_of_a_gang_rank_0_is_asked_and_a_program_of_its_own_once(cell: CellDriver) -> None:
    """A stop overtakes the request: nothing is asked any more."""
    cell.submit("g", job_spec(workers=2, checkpoint="signal"))
    cell.start("g")
    (fact,) = cell.feed(asks("g")).facts[1:]
    assert [order.task_id for order in orders_of(cell.state, fact, cell.state.seq)] == ["g.1.w0"]
    assert saves(cell) == []
    cell.feed(JobCancelRequested(job_id="g"))
    assert orders_of(cell.state, fact, cell.state.seq) == []


def test_a_checkpoint_of_an_earlier_attempt_that_comes_late_is_refused(cell: CellDriver) -> None:
    """Its reporter was down; the next attempt has begun elsewhere."""
    late = saved(cell, "a.1.w0", 100)
    again(cell, "a")
    assert cell.feed(late).reason == "unknown_task"
    assert cell.job("a").saving.checkpoint is None


def test_what_it_needs_has_nothing_to_do_with_it(cell: CellDriver) -> None:
    """A checkpoint without a path, as simulated ones are, is kept for its cost and carried nowhere."""
    cell.submit("s", SAVES, estimate())
    cell.start("s")
    cell.feed(saved(cell, "s.1.w0", 3, path="", save_ms=4_000))
    kept = cell.job("s").saving.checkpoint
    assert kept is not None
    assert kept.save_ms == 4_000
    again(cell, "s")
    assert starts(cell)["s.2.w0"] == ""
