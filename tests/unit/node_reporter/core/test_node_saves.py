"""The node's choices about what a task saves and leaves behind: orders and exits in, exact changes and
actions out."""

import pytest

from penstock.model.decisions.orders import CheckpointTask, Peer
from penstock.model.inputs.external_events import TaskExited
from penstock.model.inputs.saves import SaveRefused
from penstock_services.node_reporter.core.actions import AskToSave, Discard, LookForSaver, Note, Signal
from penstock_services.node_reporter.core.inputs import Gone, Outcome, Unsaved
from tests.unit.node_reporter.core.test_node_core import World, start, stop, world

__all__ = ["world"]


def test_a_checkpoint_reaches_running_tasks_only(world: World) -> None:
    """OrderRefused would free the place of a task that runs, so an adjustment is never refused that way. A
    job that saves by the SDK is saved by who has registered: SIGUSR1 may be something else's."""
    save = CheckpointTask(token=4, node_id="n1", task_id="t1")
    assert [type(d) for d in world.feed(save)] == [Note]
    world.run(start(1))
    assert world.feed(save) == [AskToSave("t1", 1, 4, by_sdk=False)]
    world.feed(Gone("t1", 1, Outcome(9, exit_code=0)))
    world.run(start(2, checkpoint=""))
    assert world.feed(CheckpointTask(token=4, node_id="n1", task_id="t2")) == [
        AskToSave("t2", 2, 4, by_sdk=True)
    ]


@pytest.mark.parametrize(
    ("checkpoint", "remedy"), [("", "call checkpoint(save, restore)"), (None, "SIGUSR1")]
)
def test_a_request_that_no_process_takes_is_answered_with_the_reason(
    world: World, checkpoint: str | None, remedy: str
) -> None:
    """`run.sh` starts a training that never calls `checkpoint()`: "asked to save" was all that was said,
    and nothing was saved."""
    world.run(start(1, checkpoint=checkpoint))
    world.feed(Unsaved("t1", 1, 4, 90))
    (refused,) = world.reported()
    assert isinstance(refused, SaveRefused)
    assert remedy in refused.reason
    assert (refused.task_id, refused.token, refused.at_ms) == ("t1", 1, 90)
    world.feed(Gone("t1", 1, Outcome(91, exit_code=0)))
    assert world.feed(Unsaved("t1", 1, 4, 92)) == []


@pytest.mark.parametrize(("checkpoint", "looks"), [("", True), (None, False)])
def test_before_a_job_that_saves_is_stopped_its_saver_is_looked_for(
    world: World, checkpoint: str | None, looks: bool
) -> None:
    """A stop loses the work of a training that has not registered: the cell learns so, and not its next
    user."""
    world.run(start(1, checkpoint=checkpoint))
    found = world.feed(stop(2, "t1"))
    assert any(isinstance(each, LookForSaver) for each in found) == looks
    assert isinstance(found[-2], Signal)


@pytest.mark.parametrize(
    ("left", "stopped", "detail"),
    [
        (0, False, ""),
        (1, False, "1 process left running was ended"),
        (2, False, "2 processes left running were ended"),
        (2, True, "2 processes did not end within the grace and were killed"),
    ],
)
def test_what_a_program_has_left_running_is_counted(
    world: World, left: int, stopped: bool, detail: str
) -> None:
    """`nohup train.py &` as the last line of a script: the job succeeds at once, and its training is
    ended."""
    world.run(start(1))
    if stopped:
        world.feed(stop(2, "t1"))
    world.feed(Gone("t1", 1, Outcome(9, exit_code=0, left=left)))
    (exited,) = world.reported()
    assert isinstance(exited, TaskExited)
    assert exited.detail == detail


ALONE = (Peer(rank=0, role="worker", node_id="n1", address="a"),)
GANG = (*ALONE, Peer(rank=1, role="worker", node_id="n2", address="b"))


@pytest.mark.parametrize(
    ("peers", "checkpoint", "exit_code", "stopped", "discards"),
    [
        (ALONE, "", 0, False, True),
        (ALONE, "attempt-1-iteration-7", 0, False, True),
        (ALONE, None, 0, False, False),
        (ALONE, "", 1, False, False),
        (ALONE, "", 0, True, False),
        (GANG, "", 0, False, False),
    ],
)
def test_what_a_job_saved_is_discarded_only_where_its_end_is_certain(
    world: World,
    peers: tuple[Peer, ...],
    checkpoint: str | None,
    exit_code: int,
    stopped: bool,
    discards: bool,
) -> None:
    """Other members of a gang may still fail, a failed or stopped job goes on at its checkpoint, and a job
    that saves nothing has none."""
    world.run(start(1, peers=peers, checkpoint=checkpoint))
    if stopped:
        world.feed(stop(2, "t1"))
    found = world.feed(Gone("t1", 1, Outcome(90, exit_code=exit_code)))
    assert any(isinstance(decision, Discard) for decision in found) == discards


def test_a_later_attempt_keeps_what_its_job_saved(world: World) -> None:
    """A task that was reported dead by mistake exits with 0 while the next attempt runs on other GPUs
    here."""
    world.run(start(1, (0,), "job.1.w0", peers=ALONE, checkpoint="", job_id="job"))
    world.run(start(2, (1,), "job.2.w0", peers=ALONE, checkpoint="", job_id="job"))
    assert not any(isinstance(d, Discard) for d in world.feed(Gone("job.1.w0", 1, Outcome(90, exit_code=0))))
