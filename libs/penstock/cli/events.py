"""The event stream of a cell up to now, for commands that fold it: `report`, `export`, `estimator report`."""

from collections.abc import Iterator

from penstock.cli.output import remark
from penstock.client import Client
from penstock.exits import Exit, Stop
from penstock.screen import bar, console


def cell_events(client: Client, cell: str | None = None) -> Iterator[bytes]:
    """All stored events up to the ledger's present end, as JSON. `cell`: refuse if the gateway serves
    another.

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


def cell_now_ms(client: Client) -> int:
    """The ledger's time now, also where the latest record is older. Raises `Stop`."""
    return int(client.get("/v1/queue", limit=1)["now_ms"])


def events_until(client: Client, last_seq: int) -> Iterator[bytes]:
    """The events of all records up to this one. Raises `Stop` where the stream ends before it."""
    seen = 0
    with (
        bar(console(stderr=True), "reading the ledger") as progress,
        client.lines("/v1/stream", after="0", until=last_seq) as chunks,
    ):
        rest = ""
        for chunk in chunks:
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                field, _, value = line.partition(": ")
                if field == "id":
                    seen = int(value.partition(".")[0])
                elif field == "data":
                    yield value.encode()
            progress(seen / max(1, last_seq))
    if seen < last_seq:
        raise Stop(
            Exit.UNREACHABLE, f"{client.server} ended the stream at record {seen} of {last_seq}; try again"
        )
