"""Commands of a job: bounds of the kernel, and the packed form of a long command, which fits into an event.

A command within the bounds of `JobSpec.command` is written there. A longer one (a generated list of files, a
script) is packed into `JobSpec.long_command`, since readers of version 0.1.0 refuse longer words; `command`
then has one word for people to read, which names no program: an earlier placer that takes over starts nothing
else in its place.
"""

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from typing import Any

MAX_ARGUMENT_BYTES = 131_071  # Linux: MAX_ARG_STRLEN, 32 pages, with the NUL at its end
MAX_ARGUMENTS = 16_384
MAX_COMMAND_BYTES = MAX_ARGUMENT_BYTES + 16_385  # one of the longest arguments, and others beside it
MAX_PACKED_CHARS = 4 * (MAX_COMMAND_BYTES + 8 * MAX_ARGUMENTS) // 3
MAX_JSON_BYTES = 6 * MAX_COMMAND_BYTES + 4 * MAX_ARGUMENTS  # of which every character may be escaped
MAX_ARGV_BYTES = 16_384  # a record must stay far below 64 KiB
SHORT_WORD_CHARS, SHORT_WORDS = 8_192, 512
"""Bounds of `JobSpec.command`, with MAX_ARGV_BYTES."""
SHOWN_CHARS = 64
INTO_A_FILE = "put long arguments into a file, and give its name"


def command_problem(command: Sequence[str], most_bytes: int) -> str:
    """Why no process can be started with these words, with the remedy; empty: one can."""
    argv_bytes = len("".join(command).encode())
    if not command or not command[0]:
        return "the first word, the program, is empty; name a program"
    if argv_bytes > MAX_ARGUMENT_BYTES:
        for number, word in enumerate(command):
            if (size := len(word.encode())) > MAX_ARGUMENT_BYTES:
                return (
                    f"argument {number} has {size} bytes; a program takes {MAX_ARGUMENT_BYTES} in one; "
                    f"{INTO_A_FILE}"
                )
    if argv_bytes > most_bytes:
        return f"{argv_bytes} bytes exceed {most_bytes}; {INTO_A_FILE}"
    if "\0" in "".join(command):
        return "a NUL character cannot be passed to a process; remove it"
    return ""


def command_fields(words: Sequence[str]) -> dict[str, Any]:
    """`command` and `long_command` of a job with this command."""
    size = len("".join(words).encode())
    if (
        size <= MAX_ARGV_BYTES
        and len(words) <= SHORT_WORDS
        and all(len(word) <= SHORT_WORD_CHARS for word in words)
    ):
        return {"command": tuple(words), "long_command": None}
    text = json.dumps(list(words), ensure_ascii=False, separators=(",", ":")).encode()
    packed = base64.b64encode(zlib.compress(text)).decode()
    return {"command": (f"{words[0][:SHOWN_CHARS]} … ({size} bytes)",), "long_command": packed}


def unpacked(packed: str) -> tuple[str, ...]:
    """Inverse of `command_fields`, bounded. Raises `ValueError`."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(base64.b64decode(packed, validate=True), MAX_JSON_BYTES)
        words = json.loads(text) if reader.eof else None
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(
            "long_command cannot be read; leave it out, and give the words as `command`"
        ) from error
    if (
        not isinstance(words, list)
        or len(words) > MAX_ARGUMENTS
        or not all(isinstance(w, str) for w in words)
    ):
        raise ValueError("long_command is not a list of words; leave it out, and give the words as `command`")
    return tuple(words)


def check_long(packed: str | None) -> None:
    """Raises `ValueError` for a packed command that no process can be started with."""
    if packed is not None and (problem := command_problem(unpacked(packed), MAX_COMMAND_BYTES)):
        raise ValueError(problem)
