"""The answer to `why`, for people."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape

from penstock.cli.output import console, duration, plain_table, state
from penstock.cli.story import reason_of

MAX_NODES_SHOWN = 4


def show(answer: Mapping[str, Any]) -> None:
    """Prints either of the two kinds of answer: a placement's record, or what keeps a job waiting."""
    screen = console()
    screen.print(
        f"[bold]{answer['job_id']}[/]  {state(answer['status'])}  [dim]as of record {answer['seq']}[/]"
    )
    if answer.get("text"):
        screen.print(escape(answer["text"]), soft_wrap=True)
    if answer.get("detail"):
        screen.print(escape(answer["detail"]), soft_wrap=True)
    if answer.get("position"):
        screen.print(
            f"number {answer['position']} in the queue, waiting for {duration(answer.get('waited_ms'))}"
        )
    if answer.get("now_or_never") == "never":
        screen.print("[red]Never:[/] not even an empty cluster could hold it.")
    if answer.get("histogram"):
        _histogram("Nodes that cannot take it", answer["histogram"])
    placement = answer.get("placement")
    if placement:
        _placement(placement)
    if answer.get("next_step"):
        screen.print(f"[bold]Next:[/] {escape(answer['next_step'])}", soft_wrap=True)


def in_short(answer: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    """One line for a table."""
    placement = answer.get("placement")
    if not placement:
        return reason_of(job) or str(answer.get("text") or "")
    best = placement["candidates"][0]
    text = f"best of {placement['feasible']} by {placement['profile']}: score {best['score']:.3f}{margin(placement)}"
    if placement.get("rejected"):
        text += "; " + _counts(placement["rejected"])
    return text


def _placement(found: Mapping[str, Any]) -> None:
    """The candidates with their scores; the winner first."""
    screen = console()
    screen.print()
    table = plain_table("", "NODES", "SCORE", right=("SCORE",))
    for number, candidate in enumerate(found["candidates"]):
        mark = "[green]●[/]" if number == 0 else "[dim]○[/]"
        table.add_row(mark, escape(node_names(candidate["nodes"])), f"{candidate['score']:.4f}")
    screen.print(table)
    screen.print(f"[dim]the smaller the better; chosen by {found['profile']}{margin(found)}[/]")
    if found.get("rejected"):
        _histogram("Nodes that could not take it", found["rejected"])


def margin(found: Mapping[str, Any]) -> str:
    """`, 0.0120 ahead of the next`."""
    value = found.get("margin")
    return "" if value is None else f", {value:.4f} ahead of the next"


def node_names(nodes: list[str]) -> str:
    """`node-0 ×2, node-1`."""
    counts: dict[str, int] = {}
    for node in nodes:
        counts[node] = counts.get(node, 0) + 1
    names = [node if number == 1 else f"{node} ×{number}" for node, number in counts.items()]
    more = len(names) - MAX_NODES_SHOWN
    return ", ".join(names[:MAX_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _histogram(title: str, counts: Mapping[str, int]) -> None:
    console().print(f"{title}: {escape(_counts(counts))}", soft_wrap=True)


def _counts(counts: Mapping[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{number} {reason.replace('_', ' ')}" for reason, number in ranked)
