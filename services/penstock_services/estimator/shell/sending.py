"""Appending what must arrive: repeating it is harmless, leaving it out is not."""

import logging
from collections.abc import Sequence

from penstock.errors import AppendFailed
from penstock.log.port import Log, Message
from penstock.retry import retry

LOG = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.05, 2.0  # between appends that failed; a broker restarts in 3–5 s


async def send(log: Log, messages: Sequence[Message], what: str) -> None:
    """Until the append succeeds. `what`: the messages, for people."""
    await retry(
        lambda: log.append(messages),
        (AppendFailed,),
        first_s=FIRST_BACKOFF_S,
        longest_s=LAST_BACKOFF_S,
        on_failure=lambda error, pause_s: LOG.warning(
            "%d %s not sent, trying again in %.2f s: %s", len(messages), what, pause_s, error
        ),
    )
