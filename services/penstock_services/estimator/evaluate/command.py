"""`penstock estimator …` by itself: what each command is, and which module does it."""

import argparse
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "report": ("report", "say and draw how estimates did against what jobs used: tiers, drift, owners"),
    }
)
"""Command → (module of this package, help). A module is loaded only when its command is asked for: some need seconds."""


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 what was checked is not well, 2 bad command or data."""
    top = argparse.ArgumentParser(
        prog="penstock estimator", description="What jobs need, learned from measured runs."
    )
    verbs = top.add_subparsers(dest="command", required=True)
    module: Any = None
    for command, (name, told) in COMMANDS.items():
        verb = verbs.add_parser(command, help=told)
        if arguments[:1] == [command]:
            module = import_module(f"penstock_services.estimator.evaluate.{name}")
            module.add_arguments(verb)
    asked = top.parse_args(arguments)
    asked.line = shlex.join(["penstock", "estimator", *arguments]).replace(" --events -", "")
    run: Callable[[argparse.Namespace], int] = module.run
    return run(asked)
