"""Runs tests with one bug put in: `python -m tests.faults.mutate` reads `[[mutant, [test, …]], …]` from its
input.

Everything is imported once; each mutant is then put into a process of its own, forked from this one, two at a
time. Prints `{mutant: pytest's exit status}`; "" is no mutant. What a mutant breaks is in its name: most are
the fault laboratory's. Those below are the others: a cell recovers from them, or they are outside of the
laboratory.
"""

import contextlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import pytest

from penstock.errors import LogError
from penstock.ledger.fold import evolve_jobs
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock.model.schema import outline
from penstock.runtime.http import tls_server
from penstock.text import redaction
from penstock_services.node_reporter.shell.node import Node
from penstock_services.placer.shell import service
from penstock_services.placer.shell.dispatch import Dispatcher
from penstock_services.projector.shell.store import Store
from tests.faults.laboratory import patching
from tests.faults.laboratory.bugs import (  # noqa: F401 - they enter theirs
    lease_mutants,
    mutants,
    node_mutants,
    shell_mutants,
)
from tests.faults.laboratory.patching import replace

VARIABLE = "PENSTOCK_MUTANT"
AT_ONCE = 2
OPTIONS = (
    "-q",
    "-x",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "--no-header",
    "--tb=line",
    "--assert=plain",  # only the exit status counts, and each process would rewrite its modules
    "-m",
    "",
    "-o",
    "addopts=",
)


def _ledger_append() -> None:
    real = service.Term._append

    async def append(self: Any) -> None:
        while True:
            with contextlib.suppress(LogError):
                await real(self)

    replace(real, append)


def _orders_append() -> None:
    real = Dispatcher.send

    async def send(self: Dispatcher) -> None:
        while True:
            with contextlib.suppress(LogError):
                await real(self)

    replace(real, send)


def _own_term() -> None:
    real = Replica.take
    replace(real, lambda self, value, offset: real(self, value, offset) or True)


def _overtaking() -> None:
    real = evolve_jobs.placement_decided

    def placement_decided(state: CellState, fact: Any) -> None:
        real(state, fact)
        for job in state.jobs.values():
            job.backfill_count = 0

    replace(real, placement_decided)


def _acting_before_the_disk() -> None:
    real = Node.feed
    replace(
        real, lambda self, given, *, durable, numbers=None: real(self, given, durable=False, numbers=numbers)
    )


def _position_by_itself() -> None:
    real = Store.apply

    async def apply(self: Store, replica: Replica, expected_offset: int, batch: Any) -> None:
        await self.connection.execute(
            "UPDATE positions SET next_offset = $2 WHERE cell = $1", self._cell, replica.offset
        )
        await real(self, replica, replica.offset, batch)

    replace(real, apply)


MUTANTS: dict[str, Callable[[], None]] = {
    "a failed append to the ledger is not noticed": _ledger_append,
    "a failed append of orders is not noticed": _orders_append,
    "a placer decides before its own term was read back": _own_term,
    "a fenced placer does not stand by": lambda: replace(
        service.PlacerService.failed, lambda self, error: None
    ),
    "the head of the queue is overtaken for ever": _overtaking,
    "an order is acted on before the disk has it": _acting_before_the_disk,
    "the projector's position is committed by itself": _position_by_itself,
    "a message shows a URL's password": lambda: replace(redaction.without_password, lambda url: url),
    "a dead letter shows what the record holds": lambda: replace(outline.outline, bytes.decode),
    "the gateway's certificate is not tried at the start": lambda: replace(
        tls_server.shake_hands, lambda *_: None
    ),
    **patching.MUTANTS,
}


def put_in(name: str) -> None:
    """Changes this process for good, and those that it starts: they call `put_in_from_environment`."""
    os.environ[VARIABLE] = name
    if name:
        MUTANTS[name]()


def put_in_from_environment() -> None:
    put_in(os.environ.get(VARIABLE, ""))


def _run(given: tuple[str, Sequence[str]]) -> tuple[str, int]:
    name, tests = given
    put_in(name)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        return name, int(pytest.main([*OPTIONS, *tests]))


def main() -> int:
    wanted: list[tuple[str, list[str]]] = json.load(sys.stdin)
    for module in {
        test.partition("::")[0].removesuffix(".py").replace("/", ".") for _, ts in wanted for test in ts
    }:
        import_module(module)
    with multiprocessing.get_context("fork").Pool(AT_ONCE, maxtasksperchild=1) as pool:
        print(json.dumps(dict(pool.imap_unordered(_run, wanted))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
