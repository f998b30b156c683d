"""What `penstock submit` prints: a job's output and its phases, which come over two streams, in any order."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any, NamedTuple

import orjson
import pytest

from penstock.cli.following import follow
from penstock.cli.following.event_text import describe
from penstock.cli.following.logs import MAX_LINE_CHARS
from penstock.client import Client
from penstock.client.streams import StreamEvent
from tests.support.waiting import left_s

STARTED, INTERRUPT = "penstock.task.started", "Ctrl-C"
DATA = {
    "node_id": "n0",
    "pid": 7,
    "phase": "train",
    "outcome": "succeeded",
    "cause": "exited",
    "exit_code": 0,
    "started_ms": 0,
    "exited_ms": 0,
}


class Step(NamedTuple):
    """What the gateway sends next: a piece of output, an event of this type, or the beginning of an
    attempt."""

    output: str | None = None
    event: str | None = None
    attempt: int | None = None
    early: bool = False
    """The next step does not wait until it is dealt with."""


STARTS, PHASE = Step(event=STARTED), Step(event="penstock.task.phase_changed")


class InTurn(Client):
    """A gateway that sends the next step, on whichever of the two streams, when the one before has been dealt
    with."""

    def __init__(self, *steps: Step) -> None:
        super().__init__("http://127.0.0.1:9")
        self._steps, self._done, self._turn = steps, 0, Condition()

    def _sent(self, *, events: bool) -> Generator[Step, None, None]:
        for number, step in enumerate(self._steps):
            if (step.event is not None) != events:
                continue
            self._wait(number)
            if step.early:
                self._has_done(number)
            yield step
            self._has_done(number)

    def _has_done(self, number: int) -> None:
        with self._turn:
            self._done = max(self._done, number + 1)
            self._turn.notify_all()

    def _wait(self, number: int) -> None:
        with self._turn:
            assert self._turn.wait_for(lambda: self._done >= number, left_s()), self._steps[number]

    def stream(self, *_: Any, **__: Any) -> Generator[StreamEvent, None, None]:
        for step in self._sent(events=True):
            if step.event == INTERRUPT:
                raise KeyboardInterrupt
            data = DATA | {"task_id": f"j.{step.attempt or 1}.w0"}
            yield StreamEvent("1", str(step.event), {"type": step.event, "at_ms": 0, "data": data})

    @contextmanager
    def lines(self, *_: Any, **__: Any) -> Iterator[Iterator[str]]:
        def chunks() -> Iterator[str]:
            for step in self._sent(events=False):
                yield orjson.dumps(_frame(step)).decode() + "\n"
            self._wait(len(self._steps) - 1)  # the output ends when the job's end is known

        yield chunks()

    def find(self, job: str, *, ended: bool = False) -> dict[str, Any]:
        return {"job_id": job, "outcome": "succeeded", "attempt": 1, "submitted_ms": 0, "placed_ms": None}


def _frame(step: Step) -> dict[str, Any]:
    if step.attempt is None:
        return {"task": "w0", "text": step.output}
    return {"attempt": step.attempt, "members": [{"task": "w0", "name": "worker-0"}]}


def printed_by(capsys: pytest.CaptureFixture[str], *steps: Step) -> str:
    """What is printed of these, and of the job's end, between the job's id and the end; a phase as its
    word."""
    client = InTurn(Step(attempt=1), *steps, Step(event=follow.ENDED))
    follow.to_end(client, "j", follow.Shows.OUTPUT)
    lines = capsys.readouterr().out.removeprefix("j\n").splitlines(keepends=True)
    words = {"started": "<started>\n", "phase": "<phase>\n", "succeeded": "<succeeded>\n"}
    return "".join(next((words[word] for word in words if f" s  {word}" in line), line) for line in lines)


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        # `print` of an unbuffered Python writes a line's text and its end apart.
        (("hello\n",), "hello\n<phase>\n"),
        (("hello", PHASE, "\n"), "<phase>\nhello\n"),
        (("hel", PHASE, "lo\nyou\n"), "<phase>\nhello\nyou\n"),
        (("one\ntw", PHASE, "o", PHASE, "\n"), "one\n<phase>\n<phase>\ntwo\n"),
        # A progress bar: each state ends with a carriage return, or begins with one.
        (("10 %\r20 %\r", PHASE, "done\n"), "10 %\r\n<phase>\n20 %\rdone\n"),
        (("\r10 %", "\r20 %", PHASE, "\r30 %\n"), "\r10 %\r\n<phase>\n20 %\r30 %\n"),
        (("hello\r", PHASE, "\n"), "<phase>\nhello\r\n"),
        # What has no end is shown in the end, or when it is too much.
        (("x" * MAX_LINE_CHARS, "y", PHASE, "z\n"), "x" * MAX_LINE_CHARS + "y\n<phase>\nz\n"),
        (("hello\nyou", PHASE), "hello\n<phase>\nyou\n"),
        (
            ("hello", PHASE, Step(attempt=2), Step(event=STARTED, attempt=2), "again\n"),
            "<phase>\nhello\n<started>\nagain\n",
        ),
    ],
)
def test_a_line_of_output_is_whole_whenever_a_phase_comes(
    capsys: pytest.CaptureFixture[str], pieces: tuple[str | Step, ...], shown: str
) -> None:
    """A fast task had printed the text of its line before its start was reported, and the line's end came
    after: an empty line."""
    steps = [STARTS, *(piece if isinstance(piece, Step) else Step(output=piece) for piece in pieces)]
    if PHASE not in steps:
        steps.append(PHASE)
    assert printed_by(capsys, *steps) == "<started>\n" + shown + "<succeeded>\n"


@pytest.mark.parametrize("begins", [STARTS, Step(event="penstock.task.exited")])
def test_what_a_task_prints_comes_after_its_start(capsys: pytest.CaptureFixture[str], begins: Step) -> None:
    """A fast task had printed before its node had reported its start: its first line was read as another
    job's."""
    shown = printed_by(capsys, Step(output="hello\n", early=True), begins)
    assert shown.endswith("hello\n<succeeded>\n")
    assert (begins is STARTS) == (shown == "<started>\nhello\n<succeeded>\n")


def test_what_has_been_printed_of_a_line_is_shown_when_following_is_interrupted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C while a task prints dot after dot: the last words before its end explain what it does."""
    with pytest.raises(KeyboardInterrupt):
        printed_by(capsys, STARTS, Step(output="epoch 1 ..."), Step(event=INTERRUPT))
    assert capsys.readouterr().out.endswith("\nepoch 1 ...\n")


def test_a_sentence_has_the_start_of_each_id_that_the_gateway_gave() -> None:
    """A refusal in the ledger has whole ids; a name that a user chose stays whole."""
    asked, other = "k5yqwrn2ksd1b3kjtknma89c1", "j01hxk2m3nq4567890abcd"
    data = {"by_job_id": asked, "reason": f"{other}.1.w0 ends before nightly-k5yqwrn2ksd1b3kjtk"}
    said = "for k5yqwrn2ksd1: j01hxk2m3nq4.1.w0 ends before nightly-k5yqwrn2ksd1b3kjtk"
    assert describe("penstock.cores.reclaimed.v1", data) == ("reclaimed", said)
