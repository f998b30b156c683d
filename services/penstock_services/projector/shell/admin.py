"""`verify` and `rebuild`, each with a log connection of its own:
for the command line and for a worker process."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import uvloop

from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.runtime.following.amended_log import AmendedLog
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.rebuild import rebuild, verify

Command = Callable[[Settings, Log], Awaitable[dict[str, Any]]]
COMMANDS: Mapping[str, Command] = MappingProxyType({"verify": verify, "rebuild": rebuild})


def perform(name: str, settings: Settings) -> dict[str, Any]:
    """The command's answer, through a connection of its own. Raises `PenstockError`."""
    return uvloop.run(_with_log(COMMANDS[name], settings))


async def _with_log(command: Command, settings: Settings) -> dict[str, Any]:
    log = await AmendedLog(open_log(settings.log_url, "projector", settings.archive)).start()
    try:
        return await command(settings, log)
    finally:
        await log.close()
