"""The table of verbs, and the one place where errors become lines and an exit code."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console

from penstock.policies.profiles import UnknownProfile
from penstock.runtime.reading import BadFile
from penstock.simulator.commands import compare, export, report, simulate, traces
from penstock.simulator.commands.exits import BAD_INPUT, EPILOG, INTERRUPTED, BadCommand
from penstock.simulator.traces.cluster import BadCluster
from penstock.simulator.truths.catalogue import UnknownTruth


class Verb(NamedTuple):
    """One command."""

    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    """Adds its options."""
    run: Callable[[argparse.Namespace, Console], int]
    """Results on stdout, all else on the console given; returns the exit code. May raise what `main` tells."""


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "simulate": Verb(
            "run a trace under a profile and tell how it did", simulate.add_arguments, simulate.run
        ),
        "compare": Verb(
            "run a trace under several profiles and seeds; means with confidence intervals",
            compare.add_arguments,
            compare.run,
        ),
        "traces": Verb("list, describe and convert traces", traces.add_arguments, traces.run),
        "report": Verb("draw a page and pictures from a ledger", report.add_arguments, report.run),
        "export": Verb(
            "write the jobs that a cell ran as a trace to simulate", export.add_arguments, export.run
        ),
    }
)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    top = argparse.ArgumentParser(
        prog="penstock",
        description="The same decisions as on a real cluster, in virtual time.",
        epilog=EPILOG,
    )
    commands = top.add_subparsers(dest="command", required=True)
    for name, verb in VERBS.items():
        verb.arguments(commands.add_parser(name, help=verb.help, description=verb.help, epilog=EPILOG))
    return top


def main(arguments: Sequence[str]) -> int:
    """Exit codes: `penstock.simulator.commands.exits`."""
    asked = parser().parse_args(arguments)
    asked.line = shlex.join(("penstock", *arguments))
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        return VERBS[asked.command].run(asked, errors)
    except (BadCommand, BadCluster, BadFile, UnknownProfile, UnknownTruth) as error:
        for line in str(error.args[0]).splitlines():
            errors.print(f"penstock: {line}", markup=False)
        return BAD_INPUT
    except KeyboardInterrupt:
        errors.print("penstock: stopped before anything was finished")
        return INTERRUPTED
