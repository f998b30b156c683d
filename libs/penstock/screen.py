"""Terminal output of every command: console, borderless table, progress bar, JSON on stdout."""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Protocol, cast

import orjson
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 1_000  # columns; nothing is cut that goes into a pipe or a file


class _Trimmed:
    """A stream into which tables write their lines without the padding of the last column."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        *lines, rest = text.split("\n")
        return self._stream.write("\n".join([*(line.rstrip(" ") for line in lines), rest]))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def console(
    *, stderr: bool = False, soft_wrap: bool = False, piped_width: int = PIPED_WIDTH, whole: bool = False
) -> Console:
    """No colour when piped or with NO_COLOR; `piped_width` columns when piped, unless COLUMNS is set.

    `whole`: no column of a table is cut; a terminal that is too narrow wraps the lines.
    """
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else piped_width
    if whole:
        width = PIPED_WIDTH
    file = stream if stream.isatty() else cast(IO[str], _Trimmed(stream))
    return Console(file=file, highlight=False, soft_wrap=soft_wrap, width=width, emoji=False)


def plain_table(*columns: str, right: Collection[str] = (), wrap: Sequence[str] = ()) -> Table:
    """A table without lines, with bold heads; `right`: columns of numbers, `wrap`: columns of sentences."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name not in wrap
        )
    return table


class Bar(Protocol):
    def __call__(self, share: float, text: str = "") -> None:
        """Shows progress. `share`: share done, 0 … 1."""
        ...


@contextmanager
def bar(errors: Console, what: str) -> Iterator[Bar]:
    """Progress on a terminal: share done, a text, time elapsed and left.

    It refreshes when it is called, not by a thread: processes are forked beside it.
    """
    from rich.progress import (  # 20 ms that most commands never need
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        TextColumn("elapsed,"),
        TimeRemainingColumn(),
        TextColumn("to go"),
    )
    shown = Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal, auto_refresh=False
    )
    with shown:
        task = shown.add_task(what, total=1.0, text="")

        def update(share: float, text: str = "") -> None:
            shown.update(task, completed=min(1.0, share), text=text, refresh=True)

        yield update


def write_json(value: object) -> None:
    """Prints indented JSON and a line end on stdout."""
    write_data(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def write_data(data: bytes) -> None:
    """Prints a document on stdout as it is: in UTF-8, whatever the encoding of the terminal."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
