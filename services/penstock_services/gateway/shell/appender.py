"""Bounded append to the log: nothing is acknowledged without an append."""

import asyncio
from collections.abc import Sequence

from penstock.errors import AppendFailed, LogError, NotAllowed, TooLarge
from penstock.log.port import Log, Message, Partition
from penstock.model.wire.envelope import Envelope, signed_bytes, to_wire, topic_of
from penstock.model.wire.speakers import by_operator
from penstock.runtime.failpoints import hit
from penstock.runtime.keys.node_keys import operators_code
from penstock.runtime.settings import Settings
from penstock_services.gateway.core.problems import Problem

OVERLOADED_RETRY_S = 1
DOWN_RETRY_S = 2

SAME_AGAIN = "Send the same request again, with the same Idempotency-Key or event id: it takes effect once."


class Appender:
    """Appends events of one cell. `in_flight` counts appends that are not settled, answered or not."""

    def __init__(
        self,
        log: Log,
        settings: Settings,
        max_in_flight: int,
        answer_within_s: float,
        operator_key: bytes | None = None,
    ) -> None:
        """`operator_key`: signs events about nodes from operators and watches;
        None: the placer trusts its log."""
        self._log = log
        self._cell, self._cell_index = settings.cell, settings.cell_index
        self._key = operator_key
        self._max = max_in_flight
        self._answer_within_s = answer_within_s
        self.in_flight = 0

    async def append(self, envelopes: Sequence[Envelope]) -> None:
        """Returns once all are durable. Raises `Problem`: 429 (not tried), 503 (outcome unknown), 413."""
        if self.in_flight >= self._max:
            raise Problem(
                429,
                "overloaded",
                f"{self.in_flight} requests wait for the log; nothing of yours was written. Try again",
                retry_after_s=OVERLOADED_RETRY_S,
            )
        messages = []
        for envelope in envelopes:
            headers, value = to_wire(envelope)
            if self._key is not None and by_operator(envelope.data):
                data = signed_bytes(self._cell, envelope.id, envelope.type, value)
                headers = (*headers, operators_code(self._key, data))
            messages.append(Message(Partition(topic_of(envelope.data), self._cell_index), value, headers))
        hit("gateway.before_append")
        self.in_flight += 1
        append = asyncio.ensure_future(self._log.append(messages))
        append.add_done_callback(self._settled)
        try:
            async with asyncio.timeout(self._answer_within_s):
                await asyncio.shield(append)
        except TimeoutError:
            detail = (
                f"the log has not answered within {self._answer_within_s:g} s; the outcome is unknown. "
                f"{SAME_AGAIN}"
            )
            raise Problem(503, "log_down", detail, retry_after_s=DOWN_RETRY_S) from None
        except AppendFailed as error:
            detail = f"the log failed ({error}); the outcome is unknown. {SAME_AGAIN}"
            raise Problem(503, "log_down", detail, retry_after_s=DOWN_RETRY_S) from error
        except TooLarge as error:
            raise Problem(413, "too_large", str(error)) from error
        except NotAllowed as error:
            detail = (
                f"this log does not let the gateway write there: {error}. Hand it in with a service that may"
            )
            raise Problem(403, "log_refuses", detail) from error
        except LogError as error:
            raise Problem(503, "log_down", f"the log is away: {error}", retry_after_s=DOWN_RETRY_S) from error
        hit("gateway.after_append")

    def _settled(self, append: "asyncio.Future[list[int]]") -> None:
        self.in_flight -= 1
        if not append.cancelled():
            append.exception()  # retrieved: the request has reported it, or has given up waiting
