"""The event stream of a cell up to now, for commands that fold it: `report`, `export`, `estimator report`."""

from collections.abc import Iterator

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from penstock.cli.client import Gateway
from penstock.cli.output import remark
from penstock.exits import Exit, Stop
from penstock.screen import console


def cell_events(client: Gateway, cell: str | None = None) -> Iterator[bytes]:
    """All stored events up to the ledger's present end, as JSON. `cell`: refuse if the gateway serves another.

    Raises `Stop`, also where the stream ends early: half of the events would give a trace that looks whole.
    """
    status = client.get("/v1/status")
    if cell is not None and status["cell"] != cell:
        raise Stop(
            Exit.PROBLEM, f"{client.server} serves cell {status['cell']}, not {cell}; name its gateway"
        )
    if behind := int(status["projector_lag"]):
        remark(f"penstock: the read models are {behind} records behind the ledger; this waits for them")
    return events_until(client, int(status["seq"]))


def events_until(client: Gateway, last_seq: int) -> Iterator[bytes]:
    """The events of all records up to this one. Raises `Stop` where the stream ends before it."""
    columns = (TextColumn("reading the ledger"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    screen = console(stderr=True)
    seen = 0
    with (
        Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar,
        client.lines("/v1/stream", after="0", until=last_seq) as chunks,
    ):
        task = bar.add_task("", total=last_seq)
        rest = ""
        for chunk in chunks:
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    seen = int(value.partition(".")[0])
                elif field == "data":
                    yield value.encode()
            bar.update(task, completed=seen)
    if seen < last_seq:
        raise Stop(
            Exit.UNREACHABLE, f"{client.server} ended the stream at record {seen} of {last_seq}; try again"
        )
