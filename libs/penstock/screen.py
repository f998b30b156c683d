"""Terminal output of every command: console, borderless table, JSON on stdout."""

import os
import sys
from collections.abc import Sequence

import orjson
from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 1_000  # columns; nothing is cut that goes into a pipe or a file


def console(*, stderr: bool = False, soft_wrap: bool = False, piped_width: int = PIPED_WIDTH) -> Console:
    """No colour when piped or with NO_COLOR; `piped_width` columns when piped, unless COLUMNS is set."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else piped_width
    return Console(file=stream, highlight=False, soft_wrap=soft_wrap, width=width, emoji=False)


def plain_table(*columns: str, right: Sequence[str] = (), wrap: Sequence[str] = ()) -> Table:
    """A table without lines, with bold heads; `right`: columns of numbers, `wrap`: columns of sentences."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(
            name, justify="right" if name in right else "left", overflow="fold", no_wrap=name not in wrap
        )
    return table


def write_json(value: object) -> None:
    """Indented JSON and a line end on stdout."""
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    sys.stdout.buffer.flush()
