"""`penstock …` in this process, with the events of a cell from a list instead of a gateway."""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.cli.app import run
from penstock.cli.session import Session
from penstock.commandline import parsed
from penstock.simulator.commands.simulate import SimulateOptions


@dataclass(slots=True)
class Recorded(Session):
    """A cell whose events are these, as JSON."""

    recorded: Iterable[bytes] = ()

    def events(self, cell: str | None = None) -> Iterator[bytes]:
        return iter(self.recorded)


def penstock(*arguments: str, events: Iterable[bytes] = ()) -> int:
    """The exit code of one command line."""
    return run(arguments, Recorded(shlex.join(["penstock", *arguments]), recorded=events))


def simulate_options(*arguments: str) -> SimulateOptions:
    """The options of `penstock simulate` with these arguments. Raises what typer raises."""
    return parsed(SimulateOptions, arguments, "simulate")
