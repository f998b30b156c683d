"""Output of a job's tasks as text or as JSON lines: prefixes, whole lines where several tasks speak, and what could not be read. Pure."""

import codecs
import re
from collections.abc import Sequence
from typing import NamedTuple

import orjson

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
    """Whether its program has started, so that there must be output, be it empty."""

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
        """Whether that is its id, with or without the job's, or one of its names."""
        return name in (self.task_id, self.task_id.removeprefix(f"{self.job_id}."), self.short, self.name)


class Ask(NamedTuple):
    """The part of each log that is wanted."""

    tail: int | None = None
    since_ms: int | None = None
    age_ms: int | None = None
    """Only what is no older, by the clock of the node."""


class Unreadable(Exception):
    """Why a log cannot be read, in one line."""


class NoFile(Unreadable):
    """The node answers and has no such log."""


class Begin(NamedTuple):
    """An attempt, whose members' output follows."""

    attempt: int
    members: Sequence[Member]


class Text(NamedTuple):
    """Output. Of one of several members: whole lines."""

    member: Member
    data: bytes


class Trouble(NamedTuple):
    """Why there is no output, for now or (`final`) at all."""

    text: str
    member: Member | None = None
    final: bool = True


Piece = Begin | Text | Trouble


class Lines:
    """Whole lines of what comes in chunks."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """What is whole now, each line with its end; empty: nothing."""
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
    """For people: output as it is, of several members each line with its member before it."""

    MEDIA_TYPE = "text/plain; charset=utf-8"

    def __init__(self) -> None:
        self._prefixed = False
        self._begun = False

    def render(self, piece: Piece) -> bytes:
        match piece:
            case Begin(attempt, members):
                again, self._begun = self._begun, True
                self._prefixed = len(members) > 1
                return f"[penstock: attempt {attempt}]\n".encode() if again else b""
            case Text(member, data) if self._prefixed:
                prefix = f"{member.name} | ".encode()
                return b"".join(prefix + line for line in data.splitlines(keepends=True))
            case Text(_, data):
                return data
            case Trouble(text, member, _):
                return f"[penstock: {text if member is None else f'{member.name}: {text}'}]\n".encode()


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
            case Trouble(text, member, final):
                task = None if member is None else member.short
                return _line({"task": task, "problem": text, "final": final})


def _line(found: dict[str, object]) -> bytes:
    return orjson.dumps(found) + b"\n"
