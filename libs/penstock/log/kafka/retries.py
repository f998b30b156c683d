"""Retries of Kafka calls: how long an absent cluster is waited for, and which error says so afterwards.

aiokafka repeats single requests itself, idempotent writes without duplicates. Starts of clients and admin
requests are repeated here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import (
    AuthenticationFailedError,
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    KafkaConnectionError,
    KafkaError,
    TopicAuthorizationFailedError,
)

from penstock.backoff import retry
from penstock.errors import LogError, NotAllowed
from penstock.log.kafka.aiokafka_gaps import abandon_producer, within_bound

START_LIMIT_S = 30.0  # a broker starts in 2–4 s, and comes back from kill -9 in 3–5 s
DELIVERY_TIMEOUT_S = 30.0  # a write not acknowledged by then is given up; covers a broker restart
REQUEST_TIMEOUT_MS = 10_000  # one request; aiokafka repeats it
RETRY_S = 0.2  # between attempts to reach a broker that is away

DENIED = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError, GroupAuthorizationFailedError)
_UNREACHABLE = (KafkaConnectionError, AuthenticationFailedError, OSError)
Result = TypeVar("Result")


async def started(make: Callable[[], Any], limit_s: float, identity: str, bootstrap: str) -> Any:
    """A started client. Waits for an absent cluster; a wrong password looks the same.

    Raises `NotAllowed`, and `LogError` after `limit_s`.
    """
    deadline_s = asyncio.get_running_loop().time() + limit_s

    async def attempt() -> Any:
        client = make()
        try:
            async with asyncio.timeout_at(deadline_s):
                await client.start()
        except BaseException:
            await _abandon(client)
            raise
        return client

    try:
        return await retry(attempt, _UNREACHABLE, first_s=RETRY_S, longest_s=RETRY_S, limit_s=limit_s)
    except DENIED as error:
        raise _denied(identity, error) from error
    except _UNREACHABLE as error:
        raise LogError(
            f"Kafka at {bootstrap} cannot be reached as {identity} ({error!r}): "
            "check the address, the name and the password, and that either both ends encrypt (?ca=) or "
            "neither"
        ) from error


async def answered(question: Callable[[], Awaitable[Result]], identity: str, bootstrap: str) -> Result:
    """The answer to an admin request, repeated while the cluster is away.

    Raises `NotAllowed`, and `LogError` after `START_LIMIT_S`.
    """

    async def attempt() -> Result:
        try:
            return await question()
        except DENIED as error:
            raise _denied(identity, error) from error

    try:
        return await retry(
            attempt, (KafkaError, OSError), first_s=RETRY_S, longest_s=RETRY_S, limit_s=START_LIMIT_S
        )
    except (KafkaError, OSError) as error:
        raise LogError(f"Kafka at {bootstrap} does not answer: {error!r}") from error


def _denied(identity: str, error: KafkaError) -> NotAllowed:
    """What a service without the right is told."""
    return NotAllowed(f"{identity} may not do that on Kafka: {error!r}")


async def _abandon(client: Any) -> None:
    """Closes a client at once, with all its buffers."""
    if isinstance(client, AIOKafkaProducer):
        await abandon_producer(client)
    else:
        await within_bound(client.close() if isinstance(client, AIOKafkaAdminClient) else client.stop())
