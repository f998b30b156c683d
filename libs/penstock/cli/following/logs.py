"""`penstock logs`, and the output that `submit` prints: the output of a job's tasks, with the task before
each line if there are several."""

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from penstock.cli import moments
from penstock.cli.common import JobArgument, find_job, gateway
from penstock.cli.output import remark
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.text.redraw import redrawn

AFTER_END_S = 10.0  # without any output; then a job that has ended is followed no further
CLEAR = "\r\033[K"  # to the beginning of the row, and empty it
MAX_LINE_CHARS = 65_536  # of a line that has not ended; a longer one is shown in parts


def logs(
    ctx: typer.Context,
    job: JobArgument,
    go_on: Annotated[
        bool, typer.Option("--follow", "-f", help="Continue, across retries, until the job ends.")
    ] = False,
    task: Annotated[
        str | None, typer.Option(help="One task, such as w0 or ps0; by default all tasks.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Number of an earlier attempt; by default the latest.")
    ] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last lines of each task.")] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="10:42|5m|DATE", help="Only output since this time, or no older than this."),
    ] = None,
) -> None:
    """Print a job's output.

    Exit code 1 if some of it cannot be read, which a line on stderr explains, else 0, whatever the job's
    outcome.
    """
    client = gateway(ctx)
    found = find_job(client, job)
    job_id, part = found["job_id"], moments.since(since, found["now_ms"])
    shown = Shown()
    asked = {"task": task, "attempt": attempt, "tail": tail, "follow": 1 if go_on else None, **part}
    for frame in frames(client, job_id, **asked):
        shown.take(frame)
    if shown.attempt is None and not shown.missing:
        remark(f"{job_id} has no output: none of its tasks was started.")
    if shown.missing:
        raise typer.Exit(Exit.PROBLEM)


def frames(client: Client, job_id: str, **asked: Any) -> Iterator[dict[str, Any]]:
    """The gateway's pieces of output as they come. Raises `Stop`."""
    with client.lines(f"/v1/jobs/{job_id}/logs", format="ndjson", **asked) as chunks:
        rest = ""
        for chunk in chunks:
            *whole, rest = (rest + chunk).split("\n")
            for line in whole:
                yield json.loads(line)


@dataclass(slots=True)
class Shown:
    """Printer of a job's output, with the state of the line that it is in."""

    whole_lines: bool = False
    """A line is printed once it has ended, since other lines come between.
    Each state of a progress bar is a line."""
    attempt: int | None = None
    missing: bool = False
    """Some of it could not be read."""
    at_line_start: bool = True
    _rest: str = ""
    """The buffered beginning of a line that is printed whole."""
    _names: dict[str, str] = field(default_factory=dict)
    _line: str = ""
    """The shown state of a line that has not ended, such as a progress bar."""

    def take(self, frame: dict[str, Any]) -> None:
        """Prints one piece; a frame that is not output goes to stderr."""
        if "text" in frame:
            text = self._prefixed(frame["task"], frame["text"])
            self._print(self._ended(text) if self.whole_lines else text)
        elif "line" in frame:
            self._redraw(frame["task"], frame["line"].rstrip("\r"), redraws=frame["redrawn"])
        elif "problem" in frame:
            name = self._names.get(frame["task"], frame["task"])
            if frame["final"]:
                self.end()
            self.fresh_line()
            remark(f"penstock: {name}: {frame['problem']}" if name else f"penstock: {frame['problem']}")
            self.missing = self.missing or frame["final"]
        elif "members" in frame:
            if self.attempt is not None:
                self.end()
                remark(f"penstock: attempt {frame['attempt']}")
            self.attempt = frame["attempt"]
            self._names = {one["task"]: one["name"] for one in frame["members"]}

    def fresh_line(self) -> None:
        """Ends a line that has not ended; on a terminal its shown state is removed."""
        if not self.at_line_start:
            self._write(CLEAR if self._line and sys.stdout.isatty() else "\n")
        self._line, self.at_line_start = "", True

    def end(self) -> None:
        """The output ends here, in the middle of a line or not."""
        rest, self._rest = self._rest, ""
        self._print(rest)
        self.fresh_line()

    def _ended(self, text: str) -> str:
        """The lines that this text ends; a carriage return at its end may be half of a line end."""
        text = self._rest + text
        cut = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        if len(text) - cut > MAX_LINE_CHARS:
            cut = len(text)
        self._rest = text[cut:]
        return text[:cut]

    def _prefixed(self, task: str, text: str) -> str:
        if len(self._names) < 2:
            return text
        prefix = f"{self._names[task]} | "
        return "".join(prefix + line + "\n" for line in text.removesuffix("\n").split("\n"))

    def _redraw(self, task: str, line: str, *, redraws: bool) -> None:
        """Shows the state of a line that has not ended: on a terminal in its last row, else in its place, or,
        where other lines come between, the states of progress bars as lines of their own.
        """
        if sys.stdout.isatty():
            if self.at_line_start or self._line:
                line = self._prefixed(task, line).removesuffix("\n")
                width = shutil.get_terminal_size().columns - 1
                self._write(CLEAR + (line if "\033" in line else line[:width]))
                self._line = line
        elif len(self._names) < 2 and not self.whole_lines:
            self._write(redrawn(self._line, line))
            self._line = line
        elif redraws and not self._rest:
            self._print(self._prefixed(task, line).removesuffix("\n") + "\n")

    def _print(self, text: str) -> None:
        if text:
            if self._line:
                text = CLEAR + text if sys.stdout.isatty() else redrawn(self._line, text)
                self._line = ""
            self._write(text)

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(text)
            sys.stdout.flush()
            self.at_line_start = text.endswith("\n")


class Following:
    """A job's output in whole lines, printed by a thread of its own. An error is one line on stderr and does
    not affect the job."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.lock = threading.Lock()
        """Held while a line is printed."""
        self._client, self._job_id = client, job_id
        self._shown = Shown(whole_lines=True)
        self._pieces = 0
        self._begun: set[str] = set()
        self._over = False
        self._may_print = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Following":
        """Locks the output so that a line of another kind starts on a line of its own."""
        self.lock.acquire()
        self._shown.fresh_line()
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def begun(self, task: str) -> None:
        """The line that this task (`1.w0`: attempt and name) has started, or ended, is printed: what it
        prints may follow."""
        with self._may_print:
            self._begun.add(task)
            self._may_print.notify_all()

    def silence(self) -> None:
        """Stops printing: the command ends while output still comes."""
        self.lock.acquire()
        with suppress(OSError):  # the reader of stdout may have ended
            self._shown.end()

    def finish(self) -> None:
        """Waits for the rest of an ended job's output, as long as some comes."""
        with self._may_print:
            self._over = True
            self._may_print.notify_all()
        before = -1
        while self._thread.is_alive() and before != self._pieces:
            before = self._pieces
            self._thread.join(AFTER_END_S)
        if self._thread.is_alive():
            with self.lock:
                self._shown.end()
                remark(
                    f"penstock: the rest of the output does not come; `penstock logs {self._job_id}` shows it"
                )

    def _run(self) -> None:
        try:
            for frame in frames(self._client, self._job_id, follow=1, first=1):
                self._await_start(frame)
                with self.lock:
                    self._pieces += 1
                    self._shown.take(frame)
            with self.lock:
                self._shown.end()
        except (Stop, ValueError, OSError, RuntimeError) as error:  # the last: of a closed client
            with self.lock:
                self._shown.end()
                remark(f"penstock: no further output is shown: {error}")

    def _await_start(self, frame: dict[str, Any]) -> None:
        """A task prints before its node has reported its start: the stream of events has its own way."""
        if "text" in frame:
            task = f"{self._shown.attempt}.{frame['task']}"
            with self._may_print:
                self._may_print.wait_for(lambda: self._over or task in self._begun)
