"""`verify` and `rebuild` as commands (one JSON object on stdout) and as functions for a worker process."""

import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import orjson
import uvloop

from penstock.errors import ConfigurationError, KernelError
from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.runtime.service import EXIT_CONFIGURATION, EXIT_FAILED
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.rebuild import rebuild, verify

Command = Callable[[Settings, Log], Awaitable[dict[str, Any]]]
COMMANDS: Mapping[str, Command] = MappingProxyType({"verify": verify, "rebuild": rebuild})


def run_command(name: str) -> int:
    """Runs it to its end; the process's exit status."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {name} %(levelname)s: %(message)s")
    try:
        found = perform(name, Settings.from_env())
    except ConfigurationError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except KernelError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    sys.stdout.write(orjson.dumps(found).decode() + "\n")
    return 0 if found["ok"] else EXIT_FAILED


def perform(name: str, settings: Settings) -> dict[str, Any]:
    """The command's answer, through a connection of its own. Raises `KernelError`."""
    return uvloop.run(_with_log(COMMANDS[name], settings))


async def _with_log(command: Command, settings: Settings) -> dict[str, Any]:
    log = await open_log(settings.log_url, "projector").start()
    try:
        return await command(settings, log)
    finally:
        await log.close()
