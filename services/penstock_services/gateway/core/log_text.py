"""Rendering of a job's output as text or as JSON lines: prefixes, whole lines where several tasks write, and
unreadable logs. Pure."""

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from penstock.text.redraw import redrawn

MAX_LINE_BYTES = 65_536  # a longer line of one of several tasks is cut
LINE_END = re.compile(rb"\r\n|\r")
"""Progress bars end their lines with a carriage return."""
ROLES = {"w": "worker", "ps": "ps"}
NAME = re.compile(r"(w|ps)([0-9]+)")


class Member(NamedTuple):
    """One task of one attempt."""

    task_id: str
    job_id: str
    attempt: int
    node_id: str
    started: bool
    """Whether its program has started, so that a log must exist, even an empty one."""

    @property
    def short(self) -> str:
        """`w1`, `ps0`."""
        return self.task_id.rpartition(".")[2]

    @property
    def name(self) -> str:
        """`worker-1`, `ps-0`."""
        found = NAME.fullmatch(self.short)
        return f"{ROLES[found[1]]}-{found[2]}" if found else self.short

    def is_called(self, name: str) -> bool:
        """Whether the name is its id, with or without the job's, or one of its names."""
        return name in (self.task_id, self.task_id.removeprefix(f"{self.job_id}."), self.short, self.name)


class Ask(NamedTuple):
    """The requested part of each log."""

    tail: int | None = None
    since_ms: int | None = None
    age_ms: int | None = None
    """Only output that was no older at the request, by the clock of the node."""
    asked_ms: int = 0
    """Time of the request, by the clock of the gateway."""

    def parameters(self, now_ms: int) -> dict[str, int | None]:
        """Query parameters of a request to a node."""
        age_ms = None if self.age_ms is None else self.age_ms + max(0, now_ms - self.asked_ms)
        return {"tail": self.tail, "since_ms": self.since_ms, "age_ms": age_ms}

    def since(self) -> int | None:
        """`since_ms` or `age_ms`, whichever is later, where no node's clock is available."""
        if self.age_ms is None:
            return self.since_ms
        return max(self.since_ms or 0, self.asked_ms - self.age_ms)


class Unreadable(Exception):
    """Why a log cannot be read, in one line."""


class NoFile(Unreadable):
    """The node answers and has no such log."""


class NoAnswer(Unreadable):
    """The node does not answer, which may be temporary."""


class Begin(NamedTuple):
    """Start of an attempt; its members' output follows."""

    attempt: int
    members: Sequence[Member]


class Text(NamedTuple):
    """Output of one member. Of one of several members: whole lines."""

    member: Member
    data: bytes


class Line(NamedTuple):
    """The present state of a line that has not ended, in place of the state before. Output that follows has
    the line again."""

    member: Member
    data: bytes
    redrawn: bool = False
    """It had another state before: a progress bar, and not the first half of a line."""


class Trouble(NamedTuple):
    """Why there is no output, for now or (`final`) permanently."""

    text: str
    member: Member | None = None
    final: bool = True


Piece = Begin | Text | Line | Trouble


class Lines:
    """Splits chunks into whole lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """The lines completed by this chunk, each with its end; empty: none."""
        data = self._rest + chunk
        held = data[-1:] if data.endswith(b"\r") else b""  # perhaps the first half of \r\n
        data = LINE_END.sub(b"\n", data[: len(data) - len(held)])
        cut = data.rfind(b"\n") + 1
        if cut == 0 and len(data) > MAX_LINE_BYTES:
            data += b"\n"
            cut = len(data)
        self._rest = data[cut:] + held
        return data[:cut]

    def end(self) -> bytes:
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return rest + b"\n" if rest else b""


class AsText:
    """For terminals: output as it is, of several members each line with its member before it: whole lines,
    and states of progress bars."""

    MEDIA_TYPE = "text/plain; charset=utf-8"

    def __init__(self) -> None:
        self._prefixed = False
        self._begun = False
        self._line_end = b""
        """The end of the line that has begun."""
        self._line = b""
        """The shown state of a line that has not ended."""

    def render(self, piece: Piece) -> bytes:
        match piece:
            case Begin(attempt, members):
                again, self._begun = self._begun, True
                self._prefixed = len(members) > 1
                return self._remark(f"attempt {attempt}") if again else b""
            case Line(member, data, is_redrawn):
                if self._prefixed:
                    whole = f"{member.name} | ".encode() + data.rstrip(b"\r") + b"\n"
                    return whole if is_redrawn else b""
                shown, self._line, self._line_end = self._line, data, b"\n"
                return redrawn(shown, data)
            case Text(member, data):
                self._line_end = b"" if data.endswith(b"\n") else b"\n"
                if not self._prefixed:
                    shown, self._line = self._line, b""
                    return redrawn(shown, data)
                prefix = f"{member.name} | ".encode()
                return b"".join(prefix + line for line in data.splitlines(keepends=True))
            case Trouble(text, member, _):
                return self._remark(text if member is None else f"{member.name}: {text}")

    def _remark(self, text: str) -> bytes:
        end, self._line_end, self._line = self._line_end, b"", b""
        return end + f"[penstock: {text}]\n".encode()


class AsJsonLines:
    """For programs: one object per line."""

    MEDIA_TYPE = "application/x-ndjson"

    def __init__(self) -> None:
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}

    def render(self, piece: Piece) -> bytes:
        match piece:
            case Begin(attempt, members):
                self._decoders.clear()
                found = [
                    {"task": one.short, "name": one.name, "task_id": one.task_id, "node_id": one.node_id}
                    for one in members
                ]
                return _line({"attempt": attempt, "members": found})
            case Text(member, data):
                decoder = self._decoders.get(member.task_id)
                if decoder is None:
                    decoder = self._decoders[member.task_id] = codecs.getincrementaldecoder("utf-8")(
                        "replace"
                    )
                return _line({"task": member.short, "text": decoder.decode(data)})
            case Line(member, data, is_redrawn):
                state = data.decode(errors="replace")
                return _line({"task": member.short, "line": state, "redrawn": is_redrawn})
            case Trouble(text, member, final):
                task = None if member is None else member.short
                return _line({"task": task, "problem": text, "final": final})


def _line(found: dict[str, object]) -> bytes:
    return orjson.dumps(found) + b"\n"
