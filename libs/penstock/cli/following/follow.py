"""Follows one job to its end by the stream of its events."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any
from urllib.parse import quote

from rich.markup import escape

from penstock import exits
from penstock.cli.common import rows_of
from penstock.cli.following.event_text import QUIET, describe
from penstock.cli.following.logs import Following
from penstock.cli.output import duration, remark
from penstock.client import Client
from penstock.exits import Stop
from penstock.screen import console

TAIL_LINES = 15  # of a failed job's output
ENDED = "penstock.job.ended"
STARTED = "penstock.task.started"
BEGUN = frozenset({STARTED, "penstock.task.exited"})
"""After them a task's output is shown."""
STYLES = {"succeeded": "green", "failed": "red", "cancelled": "magenta", "can never run here": "red"}


def events_of(client: Client, job_id: str, *, tied: bool = False) -> Iterator[dict[str, Any]]:
    """The job's events from the first one to its end, as they happen. `tied`: this is the follower that the
    job is tied to."""
    for event in client.stream("/v1/stream", last_id="0", job=job_id, follows=job_id if tied else None):
        yield event.data
        if event.data["type"] == ENDED:
            return


def events_of_node(client: Client, node_id: str) -> Iterator[dict[str, Any]]:
    """The events of the node itself, those that are stored and then as they happen, for ever."""
    stored_seq = client.get("/v1/status")["projected_seq"]
    stored = rows_of(client.get(f"/v1/nodes/{quote(node_id)}/events"), "events")
    yield from stored
    last = max((event["seq"], event["n"]) for event in stored)
    for event in client.stream("/v1/stream", last_id=str(stored_seq)):
        about = event.data["node_id"] == node_id and event.data["job_id"] is None
        if about and (event.data["seq"], event.data["n"]) > last:
            yield event.data


class Shows(Enum):
    """Kinds of output while a job is followed."""

    NOTHING = auto()
    PHASES = auto()
    PHASES_AND_TAIL = auto()
    """Phases, and the end of a failed job's output."""
    OUTPUT = auto()
    """Phases, and all that the job prints, as it comes."""


def to_end(client: Client, job_id: str, shows: Shows, *, tied: bool = False) -> dict[str, Any]:
    """Prints each phase as it happens, then the ending; returns the job as it ended.
    `tied`: as of `events_of`."""
    if shows is not Shows.NOTHING:
        console().print(f"[bold]{job_id}[/]")
    output = Following(client, job_id) if shows is Shows.OUTPUT else None
    try:
        first_ms: int | None = None
        for event in events_of(client, job_id, tied=tied):
            first_ms = event["at_ms"] if first_ms is None else first_ms
            if output is not None and event["type"] == ENDED:
                output.finish()
            if shows is not Shows.NOTHING:
                with output or nullcontext():
                    print_event(event, f"{duration(event['at_ms'] - first_ms):>9}")
            if output is not None and event["type"] in BEGUN:
                output.begun(".".join(event["data"]["task_id"].rsplit(".", 2)[1:]))
    except BaseException:
        if output is not None:
            output.silence()
        raise
    job = client.find(job_id, ended=True)
    if shows is not Shows.NOTHING:
        _print_end(client, job, tail=shows is Shows.PHASES_AND_TAIL)
    return job


def to_start(client: Client, job_id: str) -> bool:
    """Prints each phase until a task of the job runs. False: the job ended before; its end is printed."""
    console().print(f"[bold]{job_id}[/]")
    first_ms: int | None = None
    for event in events_of(client, job_id):
        first_ms = event["at_ms"] if first_ms is None else first_ms
        print_event(event, f"{duration(event['at_ms'] - first_ms):>9}")
        if event["type"] == STARTED:
            return True
    _print_end(client, client.find(job_id, ended=True), tail=True)
    return False


def print_event(event: Mapping[str, Any], lead: str, *, wide: bool = False) -> None:
    """One line for an event: `lead`, word, sentence; timers, and the type's name, only with `wide`."""
    if event["type"] in QUIET and not wide:
        return
    word, sentence = describe(event["type"], event["data"] or {})
    kind = f"  [dim]{event['type']}[/]" if wide else ""
    style = STYLES.get(word, "bold")
    console().print(f"{lead}  [{style}]{word:<14} [/]{escape(sentence)}{kind}", soft_wrap=True)


def _print_end(client: Client, job: dict[str, Any], *, tail: bool) -> None:
    """The time of each phase; with `tail` also the end of a failed job's output."""
    screen = console()
    if tail and job["outcome"] == "failed":
        for line in _last_lines(client, job["job_id"]):
            screen.print("[dim]│[/] ", end="")
            screen.print(line, markup=False, soft_wrap=True)
    if job["outcome"] == "unschedulable":
        screen.print(f"{'':>9}  `penstock why {job['job_id']}` lists what would have to change", markup=False)
    queue, launch, run = phases_ms(job)
    if run is not None:
        screen.print(
            f"[dim]{'':>9}  queued {duration(queue)} · launched in {duration(launch)} · ran "
            f"{duration(run)}[/]"
        )


def _last_lines(client: Client, job_id: str) -> list[str]:
    """The end of the job's output; an error here is not one of the command."""
    try:
        return client.text(f"/v1/jobs/{job_id}/logs", tail=TAIL_LINES).splitlines()[-TAIL_LINES:]
    except Stop as error:
        remark(f"penstock: no output is shown: {error}")
        return []


def phases_ms(job: dict[str, Any], now_ms: int | None = None) -> tuple[int | None, int | None, int | None]:
    """(queue, launch, run) of the last attempt in ms: queued → placed → all tasks running → end.

    The first attempt's wait begins with the submission, a later one's when it queued again.

    A phase that has begun and not ended counts up to `now_ms`, without it None; a phase that has not begun is
    None.
    """
    again = job["attempt"] > 1 or (job["attempt"] == 1 and job.get("placed_ms") is None)
    first_ms = (job.get("queued_ms") or job["submitted_ms"]) if again else job["submitted_ms"]
    marks = [first_ms, job.get("placed_ms"), job.get("running_ms"), job.get("ended_ms")]
    end_ms = job.get("ended_ms") or now_ms
    found: list[int | None] = []
    for number in range(3):
        begin = marks[number]
        end = marks[number + 1] if marks[number + 1] is not None else end_ms
        found.append(None if begin is None or end is None else max(0, end - begin))
    return found[0], found[1], found[2]


def exit_code(job: dict[str, Any], *, propagate: bool) -> int:
    """The command's exit code for a job that ended."""
    return exits.of_job(job["outcome"], job.get("exit_code"), propagate=propagate)
