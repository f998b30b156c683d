"""Pages that a reader follows line by line: the files that they show, the commands, and what the commands
print.

A block whose second word is a name (```` ```yaml job.yaml ````) is a file. In a `console` block a line that
begins with `$ ` is a command; the lines below are its output, in which `…` stands for anything. `# exit code
11` behind a command says how the command ends, else with 0.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r" +# .*$")
CODE = re.compile(r" +# (?:.*, )?exit code (\d+)$")


class File(NamedTuple):
    """A file that the reader writes."""

    name: str
    text: str


class Command(NamedTuple):
    """A line that the reader types."""

    line: str
    """Without its comment."""
    code: int
    shows: tuple[str, ...]
    """Lines of output that the page shows, in their order."""


def steps(page: Path) -> list[File | Command]:
    """What the reader does, in order."""
    found: list[File | Command] = []
    for language, name, text in BLOCK.findall(page.read_text()):
        if name:
            found.append(File(name, text))
        elif language == "console":
            found += _commands(text.replace("\\\n", " ").splitlines())
    return found


def _commands(lines: Sequence[str]) -> list[Command]:
    found: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            code = CODE.search(line)
            found.append(Command(COMMENT.sub("", line[2:]), int(code[1]) if code else 0, ()))
        else:
            found[-1] = found[-1]._replace(shows=(*found[-1].shows, line))
    return found


def lacking(shows: Sequence[str], *printed: str) -> str:
    """The first shown line that is in no stream of output behind the lines before; "" where all are."""
    streams = [" ".join(stream.replace("│", " ").split()) for stream in printed]
    for line in shows:
        parts = [re.escape(" ".join(part.split())) for part in line.split("…") if part.strip()]
        matches = [re.search(".*?".join(parts), stream) for stream in streams]
        for number, match in enumerate(matches):
            if match:
                streams[number] = streams[number][match.end() :]
                break
        else:
            return line
    return ""
