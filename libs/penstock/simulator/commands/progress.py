"""Progress on stderr, on a terminal: share done, speed, time left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Bar(Protocol):
    def __call__(self, share: float, text: str) -> None:
        """`share`: done, 0 … 1."""
        ...


@contextmanager
def bar(errors: Console, what: str) -> Iterator[Bar]:
    """It refreshes when it is called, not by a thread: processes are forked beside it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("to go"),
    )  # fmt: skip
    shown = Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal, auto_refresh=False
    )
    with shown:
        task = shown.add_task(what, total=1.0, text="")

        def update(share: float, text: str) -> None:
            shown.update(task, completed=min(1.0, share), text=text, refresh=True)

        yield update
