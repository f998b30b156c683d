"""Which processes of a task get SIGTERM, in which order: jobs behind the wrappers that people put in front
of a training."""

import signal

import pytest

from penstock_services.node_reporter.shell.process.pids import Process
from penstock_services.node_reporter.shell.process.savers import Savers
from penstock_services.node_reporter.shell.process.stopping import next_told

HANDLES = 1 << signal.SIGTERM - 1
NOBODY = Savers()


def process(
    pid: int, command: str, parent: int = 1, *, caught: int = 0, reads: str = "", writes: str = ""
) -> Process:
    return Process(pid, parent, caught, command.encode(), reads, frozenset(writes.split()))


def rounds(processes: list[Process], registered: Savers = NOBODY, *, last: int = 9) -> list[list[int]]:
    """The pids that get SIGTERM together, where those that got it end, and at last none is left."""
    found: list[list[int]] = []
    while processes and len(found) < last:
        told = next_told(processes, registered)
        if not told:
            break
        found.append(sorted(told))
        processes = [each for each in processes if each.pid not in told]
    return found


SCRIPT = process(2, "run.sh")
TRAINS = process(3, "python train.py", 2)
PIPED = [
    process(2, "bash"),
    process(3, "python train.py", 2, writes="pipe:[7]"),
    process(4, "tee log", 2, reads="pipe:[7]", writes="pipe:[1]"),
]
HANDLER = process(3, "python train.py", 2, caught=HANDLES)
LOADERS = [process(pid, "python train.py", 3, caught=HANDLES) for pid in (4, 5)]


@pytest.mark.parametrize(
    ("processes", "registered", "told"),
    [
        # Registered: first and alone; a script that dies, `tee`, a supervisor that forwards come after it.
        ([SCRIPT, TRAINS], Savers(frozenset({3})), [[3], [2]]),
        (PIPED, Savers(frozenset({3})), [[3], [2, 4]]),
        ([SCRIPT, HANDLER, *LOADERS], Savers(frozenset({3})), [[3], [2, 4, 5]]),
        # Ranks of torchrun: the others end when rank 0 has saved, and not before.
        (
            [process(2, "torchrun", caught=HANDLES), TRAINS, *LOADERS],
            Savers(frozenset({3}), frozenset({4, 5})),
            [[3], [2, 4, 5]],
        ),
        # A rank whose rank 0 is in another task, and has ended.
        ([SCRIPT, TRAINS], Savers(frozenset(), frozenset({3})), [[2, 3]]),
        # Nobody registered: all of them, once.
        ([SCRIPT, TRAINS], NOBODY, [[2, 3]]),
        ([process(2, "trapped.sh", caught=HANDLES), TRAINS], NOBODY, [[2, 3]]),
        (PIPED, NOBODY, [[2, 3], [4]]),
        # Copies of what handles the signal are its loaders; programs of its own are not.
        ([SCRIPT, HANDLER, *LOADERS], NOBODY, [[2, 3], [4, 5]]),
        ([HANDLER, process(4, "python eval.py", 3, caught=HANDLES)], NOBODY, [[3, 4]]),
        ([SCRIPT, TRAINS, process(4, "python train.py", 3)], NOBODY, [[2, 3, 4]]),
        # `zcat data | python train.py` handles the signal: it does not only read what others print.
        (
            [process(3, "zcat", writes="pipe:[7]"), process(4, "python", caught=HANDLES, reads="pipe:[7]")],
            NOBODY,
            [[3, 4]],
        ),
    ],
)
def test_each_process_is_told_once_and_what_others_need_last(
    processes: list[Process], registered: Savers, told: list[list[int]]
) -> None:
    """A node is drained. The signal to the first process alone ended `run.sh`, and the training behind it
    was killed in the middle of its save."""
    assert rounds(processes, registered) == told
