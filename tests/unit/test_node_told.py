"""What a node makes of a script's lines: strict, bounded, and one bad line never costs the next."""

import asyncio
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.codegen.schemas import ROOT
from penstock.model.external_events import StageSample, StagesMeasured, StepsMeasured, TaskPhaseChanged
from penstock.sdk.lines import LINE_BYTES
from penstock_services.node_reporter.core.told import MAX_CHANGES, MAX_STAGES, MAX_STEPS, Hearing, Told
from penstock_services.node_reporter.shell.listener import BYTES_A_PERIOD, Listener

NOW_MS = 1_700_000_000_000
KEY = ("job-1.1.0", 7)
ABOUT = {"node_id": "n1", "task_id": KEY[0], "token": KEY[1], "at_ms": NOW_MS}
STAGES = b'{"stages":{"iterations":2,"samples":[[6.5,1,0,0,0],[54.5,0,0.25,1.0,0]]}}\n'


def hearing(*, leads: bool = True) -> Hearing:
    return Hearing("n1", *KEY, leads=leads)


def steps(done: int, **more: float) -> bytes:
    return json.dumps({"steps": {"done": done, **more}}).encode() + b"\n"


def done_of(told: list[Told]) -> list[int]:
    return [one.event.done for one in told if isinstance(one.event, StepsMeasured)]


def test_lines_become_events_with_names_of_their_own() -> None:
    """A repeat after a crash has the same name, so that it can be told."""
    told = hearing().hear(b"train\n" + steps(4, total=9, steps=3, step_ms=2.5, loss=1) + STAGES, NOW_MS)
    assert told == [
        Told(f"train/{NOW_MS}", TaskPhaseChanged.model_validate({**ABOUT, "phase": "train"})),
        Told(
            "steps/4",
            StepsMeasured.model_validate(
                {**ABOUT, "done": 4, "total": 9, "steps": 3, "step_ms": 2.5, "loss": 1.0}
            ),
        ),
        Told(
            f"stages/{NOW_MS}/1",
            StagesMeasured.model_validate(
                {
                    **ABOUT,
                    "iterations": 2,
                    "samples": (
                        StageSample(lasted_ms=6.5, storage=1.0),
                        StageSample(lasted_ms=54.5, cpu=0.25, gpu=1.0),
                    ),
                }
            ),
        ),
    ]


def test_the_lines_in_the_readme_are_understood() -> None:
    """Trainings in C++ or Julia write them by hand, as they stand there."""
    text = (ROOT / "libs/penstock/sdk/README.md").read_text()
    (lines,) = re.findall(r"```\n(train\n.*?)```", text, re.DOTALL)
    ear = hearing()
    told = ear.hear(lines.encode(), NOW_MS)
    assert [type(one.event) for one in told] == [TaskPhaseChanged, StepsMeasured, StagesMeasured]
    assert ear.garbage == 0


GARBAGE = [
    b"progress: 5%",
    b"trainsave",
    b"TRAIN",
    b"5",
    b"null",
    b"[]",
    b"{}",
    b'"train"',
    b"\xff\xfe\x00",
    b'{"steps":',
    b'{"steps":null,"stages":null}',
    b'{"steps":{}}',
    b'{"steps":{"done":0}}',
    b'{"steps":{"done":-1}}',
    b'{"steps":{"done":1.5}}',
    b'{"steps":{"done":true}}',
    b'{"steps":{"done":"1"}}',
    b'{"steps":{"done":9007199254740993}}',
    b'{"steps":{"done":' + b"9" * 3_000 + b"}}",
    b'{"steps":{"done":1,"total":0}}',
    b'{"steps":{"done":1,"loss":NaN}}',
    b'{"steps":{"done":1,"loss":1e999}}',
    b'{"steps":{"done":1,"loss":-1e101}}',
    b'{"steps":{"done":1,"step_ms":-1}}',
    b'{"steps":{"done":1,"step_ms":1e10}}',
    b'{"steps":{"done":1,"token":99}}',
    b'{"steps":{"done":1},"node_id":"n2"}',
    b'{"steps":{"done":1},"stages":{"iterations":1,"samples":[[1,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[]}}',
    b'{"stages":{"iterations":0,"samples":[[1,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[0,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,-1,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1e9,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[' + b",".join([b"[1,0,0,0,0]"] * 257) + b"]}}",
    b"[" * 4_000,
    b'{"stages":' * 400,
    b'{"steps":{"done":' + b"[" * 3_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda line: line[:40].decode(errors="replace"))
def test_garbage_is_counted_and_costs_nothing_else(garbage: bytes) -> None:
    """A script prints into the wrong descriptor, or tries what it can get away with."""
    ear = hearing()
    told = ear.hear(steps(1) + garbage + b"\n" + steps(2), NOW_MS)
    assert (done_of(told), len(told), ear.garbage) == ([1, 2], 2, 1)


@pytest.mark.parametrize("size", [LINE_BYTES, LINE_BYTES + 1, 3 * LINE_BYTES, 200_000])
def test_a_line_that_does_not_end_is_skipped_up_to_its_end(size: int) -> None:
    """Binary data by mistake; the FIFO was full in the middle of it. Nothing grows with it."""
    ear = hearing()
    told = []
    for chunk in (steps(1), *[b"x" * 1_000] * (size // 1_000), b"x" * (size % 1_000), b"\n" + steps(2)):
        told += ear.hear(chunk, NOW_MS)
    assert (done_of(told), ear.end(NOW_MS), ear.garbage) == ([1, 2], [], 1)
    assert done_of(ear.hear(b"x" * size + b"\n" + steps(3), NOW_MS)) == [3]


def test_the_longest_line_is_heard() -> None:
    """256 samples of a profiler that measures them itself fit, if they are written short."""
    samples = ",".join(["[1,0,0,1,0]"] * 256)
    line = f'{{"stages":{{"iterations":20,"samples":[{samples}]}}}}'.encode()
    (told,) = hearing().hear(line.ljust(LINE_BYTES - 1) + b"\n", NOW_MS)
    assert isinstance(told.event, StagesMeasured)
    assert len(told.event.samples) == 256


def test_a_torn_line_costs_itself_alone() -> None:
    """Its writer was killed within the write."""
    ear = hearing()
    told = ear.hear(steps(1) + steps(2)[:-9] + b"\n" + STAGES + steps(3), NOW_MS)
    assert (done_of(told), len(told), ear.garbage) == ([1, 3], 3, 1)


def test_a_phase_needs_no_line_end() -> None:
    """`printf train > $PENSTOCK_PHASE_FILE`, as it always worked."""
    ear = hearing()
    told = [*ear.hear(b"launch", NOW_MS), *ear.hear(b"train", NOW_MS), *ear.hear(b"\n save \n", NOW_MS)]
    assert [getattr(one.event, "phase", "") for one in told] == ["launch", "train", "save"]
    assert ear.garbage == 0


SOURCE = b"".join(
    [b"launch\n", steps(1), b"nonsense\n", b"train\n", steps(2, loss=0.5), STAGES, b"x" * 5_000 + b"\n", steps(3)]
)  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(SOURCE)), max_size=12))
def test_it_does_not_matter_where_reads_cut_the_lines(cuts: list[int]) -> None:
    """A pipe knows no lines; a read ends anywhere."""
    ear, told = hearing(), []
    edges = [0, *sorted(cuts), len(SOURCE)]
    for start, end in itertools.pairwise(edges):
        told += ear.hear(SOURCE[start:end], NOW_MS)
    told += ear.end(NOW_MS)
    whole = hearing()
    assert told == whole.hear(SOURCE, NOW_MS)
    assert (len(told), ear.garbage) == (6, 2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.binary(max_size=60) | st.sampled_from([line + b"\n" for line in GARBAGE[:30]]), max_size=20)
)
def test_whatever_comes_is_survived(chunks: list[bytes]) -> None:
    """And the next honest line is heard."""
    ear = hearing()
    for chunk in chunks:
        ear.hear(chunk, NOW_MS)
    assert done_of(ear.hear(b"\n" + steps(1 << 53), NOW_MS)) == [1 << 53]


# ------------------------------------------------------------------------------------------------- bounds


def test_progress_in_every_iteration_is_thinned_and_its_last_word_kept() -> None:
    """A script without the SDK tells each of 100,000 iterations: some hundred events, and the exact end."""
    ear, told = hearing(), []
    for start in range(1, 100_001, 500):
        told += ear.hear(b"".join(steps(done) for done in range(start, start + 500)), NOW_MS)
    assert 90 < len(told) < 120
    assert done_of(told)[:4] == [1, 2, 3, 4]
    assert done_of(ear.end(NOW_MS)) == [100_000]
    assert ear.garbage == 0


def test_the_iteration_that_was_announced_as_the_last_is_told_at_once() -> None:
    """It may save for an hour afterwards."""
    ear = hearing()
    told = ear.hear(b"".join(steps(done, total=104) for done in (50, 100, 104)), NOW_MS)
    assert done_of(told) == [50, 100, 104]
    assert ear.end(NOW_MS) == []


def test_after_a_resume_distances_grow_from_there() -> None:
    told = hearing().hear(b"".join(steps(90_000 + done) for done in range(1, 30)), NOW_MS)
    assert [done - 90_000 for done in done_of(told)] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 21, 24, 27]  # fmt: skip


def test_what_goes_backwards_is_not_told() -> None:
    """A second process of the same task tells its own, slower progress."""
    ear = hearing()
    told = ear.hear(b"".join(steps(done) for done in (1, 100, 3, 104, 102, 100)), NOW_MS)
    assert (done_of(told), done_of(ear.end(NOW_MS))) == ([1, 100], [104])


def test_a_hostile_script_is_bounded() -> None:
    """It announces each iteration as its last, changes its phase and its stages without end."""
    ear, told = hearing(), []
    for done in range(1, 3_000):
        told += ear.hear(steps(done, total=done) + STAGES + (b"train\n", b"save\n")[done % 2], NOW_MS)
    told += ear.end(NOW_MS)
    assert len(done_of(told)) == MAX_STEPS + 1
    assert sum(isinstance(one.event, StagesMeasured) for one in told) == MAX_STAGES
    assert sum(isinstance(one.event, TaskPhaseChanged) for one in told) == MAX_CHANGES
    names = [one.name for one in told if not isinstance(one.event, TaskPhaseChanged)]
    assert len(set(names)) == len(names)
    assert ear.unheard > 5_000


def test_of_a_gang_rank_0_alone_is_believed_for_all() -> None:
    """256 workers that all tell would be 256 times the events; phases are each worker's own."""
    ear = hearing(leads=False)
    told = ear.hear(b"train\n" + steps(1) + STAGES + b"save\n", NOW_MS) + ear.end(NOW_MS)
    assert [type(one.event) for one in told] == [TaskPhaseChanged, TaskPhaseChanged]
    assert ear.unheard == 2


# ----------------------------------------------------------------------------------------------- listener


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Path]:
    """Held open as by the shim."""
    path = tmp_path / "phases"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    yield path
    os.close(descriptor)


def write(path: Path, data: bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
    finally:
        os.close(descriptor)


async def test_what_is_left_in_the_fifo_is_heard_at_the_end(
    fifo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The task wrote its last lines and exited before the reporter looked."""
    caplog.set_level(logging.INFO)
    told: list[Told] = []
    listener = Listener(lambda key, one: told.append(one) if key == KEY else None)
    listener.follow(KEY, fifo, hearing())
    write(fifo, b"oops\n" + b"".join(steps(done) for done in (1, 20, 21)) + b"save")
    listener.forget(KEY)
    assert [one.name.partition("/")[0] for one in told] == ["steps", "steps", "save", "steps"]
    assert done_of(told) == [1, 20, 21]
    assert "1 meant nothing, 1 were not passed on" in caplog.text
    listener.forget(KEY)
    assert len(told) == 4


async def test_a_script_that_writes_without_pause_leaves_time_for_others(fifo: Path) -> None:
    """64 KiB a second are read; the rest finds the FIFO full. The reporter does its work meanwhile."""
    told: list[Told] = []
    listener = Listener(lambda _, one: told.append(one))
    listener.follow(KEY, fifo, hearing())
    written = 0
    until = time.monotonic() + 0.8
    while time.monotonic() < until:
        written += write(fifo, b"x\n" * 2_048)
        await asyncio.sleep(0)
    assert BYTES_A_PERIOD <= written <= 4 * BYTES_A_PERIOD
    while not told and time.monotonic() < until + 10:
        write(fifo, steps(5))
        await asyncio.sleep(0.01)
    assert done_of(told)[:1] == [5]
    listener.close()


async def test_many_small_writes_are_bounded_too(fifo: Path) -> None:
    """A line at a time, each a wake-up of the reporter."""
    ear = hearing()
    heard = 0

    class Counting(Hearing):
        def hear(self, chunk: bytes, now_ms: int) -> list[Told]:
            nonlocal heard
            heard += 1
            return ear.hear(chunk, now_ms)

    listener = Listener(lambda *_: None)
    listener.follow(KEY, fifo, Counting("n1", *KEY, leads=True))
    for number in range(1_000):
        write(fifo, steps(number + 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert 1 < heard <= 128
    listener.close()


@pytest.mark.parametrize("what", ["a file", "a link", "nothing"])
async def test_a_fifo_that_was_replaced_is_left_alone(tmp_path: Path, what: str) -> None:
    """The task may do that, its folder is its user's; the next reporter must start all the same, and write nowhere."""
    path, aim = tmp_path / "phases", tmp_path / "aim"
    os.mkfifo(aim)
    if what == "a file":
        path.write_text("train\n")
    elif what == "a link":
        path.symlink_to(aim)
    told: list[Told] = []
    listener = Listener(lambda _, one: told.append(one))
    listener.follow(KEY, path, hearing())
    await asyncio.sleep(0)
    listener.forget(KEY)
    listener.close()
    assert told == []
