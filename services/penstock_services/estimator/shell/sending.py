"""Appending what must arrive: repeating it is harmless, leaving it out is not."""

import asyncio
import logging
from collections.abc import Sequence

from penstock.errors import AppendFailed
from penstock.log.port import Log, Message

LOG = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0  # between appends that failed; a broker restarts in 3–5 s


async def send(log: Log, messages: Sequence[Message], what: str) -> None:
    """Until the append succeeds. `what`: the messages, for people."""
    backoff_s = FIRST_BACKOFF_S
    while True:
        try:
            await log.append(messages)
            return
        except AppendFailed as error:
            LOG.warning("%d %s not sent, trying again in %.2f s: %s", len(messages), what, backoff_s, error)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
