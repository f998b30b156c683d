"""Requests about models, answered by the estimator's own code in a worker process beside the gateway: one at
a time."""

import asyncio
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import orjson

from penstock.errors import PenstockError
from penstock.runtime.settings import Settings
from penstock.text.installing import installing
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.gateway import Gateway

Answer = dict[str, Any]


def require_free_models(gateway: Gateway) -> None:
    """Raises `Problem`."""
    if find_spec("scipy") is None or find_spec("penstock_services.estimator") is None:
        remedy = f"models need the estimator beside the gateway; {installing('estimator')}"
        raise Problem(503, "no_estimator", remedy)
    if gateway.models.lock.locked():
        raise Problem(429, "overloaded", "another question about models is being answered", retry_after_s=1)


async def answer_about_models(gateway: Gateway, work: Callable[[Settings], Answer]) -> Answer:
    """The whole answer, `ok` or not. Raises `Problem`. A caller that disconnects ends the work."""
    require_free_models(gateway)
    async with gateway.models.lock:
        working = asyncio.ensure_future(gateway.models.workers.run(answer_of, "", work, gateway.settings))
        try:
            found: Answer = orjson.loads(await asyncio.shield(working))
        except PenstockError as error:  # the worker was killed
            raise Problem(503, "no_estimate", f"the estimator could not be asked: {error}") from error
        finally:
            if not working.done():
                gateway.models.workers.close()
                await asyncio.gather(working, return_exceptions=True)
    return found


def answer_of(name: str, work: Callable[[Settings], Answer], settings: Settings) -> bytes:
    """JSON of the answer, or of the error: after `name`, unless that is empty. For a worker."""
    try:
        found = work(settings)
    except (PenstockError, LookupError, ValueError) as error:
        found = failed(name, error)
    return orjson.dumps(found)


def failed(name: str, error: Exception) -> Answer:
    return {"ok": False, "error": f"{name}: {error}" if name else str(error)}
