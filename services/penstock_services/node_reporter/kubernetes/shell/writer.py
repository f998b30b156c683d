"""Writes to pods, many at once; one result for each."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from penstock.clock import wall_ms
from penstock.runtime.race import cancelled
from penstock_services.node_reporter.kubernetes.core.messages import (
    CreatePod,
    DeletePod,
    ReadPod,
    ReleasePod,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.objects import Pod
from penstock_services.node_reporter.kubernetes.shell.api import (
    MAX_CALLS,
    MERGE_PATCH,
    TOO_MANY,
    Answer,
    ApiServer,
    Unanswered,
)
from penstock_services.node_reporter.kubernetes.shell.fence import ABSENT, CONFLICT, LOST

UNAVAILABLE = 503
BUSY_MS = 1_000  # after 429 or 503 without a time: the server's own default for Retry-After

AnyWrite = CreatePod | ReadPod | DeletePod | ReleasePod

_pod = msgspec.json.Decoder(Pod).decode


class Writer:
    """`wrote` gets each result, on the event loop."""

    def __init__(self, api: ApiServer, wrote: Callable[[Wrote], None]) -> None:
        self._api, self._wrote = api, wrote
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._under_way: set[asyncio.Task[None]] = set()

    def write(self, write: AnyWrite) -> None:
        """Begins a write; its result comes later."""
        task = asyncio.ensure_future(self._carry_out(write))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def close(self) -> None:
        """Cancels what is under way; whether that was done is not known."""
        await cancelled(list(self._under_way))

    async def _carry_out(self, write: AnyWrite) -> None:
        await asyncio.sleep(max(0, write.not_before_ms - wall_ms()) / 1_000)
        async with self._room:
            try:
                found = await self._send(write)
            except Unanswered as error:
                found = Wrote(write=write, outcome="unknown", text=str(error), now_ms=wall_ms())
        self._wrote(found)

    async def _send(self, write: AnyWrite) -> Wrote:
        """Raises `Unanswered`."""
        folder = f"/api/v1/namespaces/{write.namespace}/pods"
        path = f"{folder}/{write.name}"
        match write:
            case CreatePod():
                answer = await self._api.call("POST", folder, body=write.manifest)
                if answer.status == CONFLICT:
                    return await self._present(write, path, answer)
            case ReadPod():
                answer = await self._api.call("GET", path)
            case DeletePod():
                answer = await self._api.call("DELETE", path, body=_deletion(write))
            case ReleasePod():
                answer = await self._api.call("PATCH", path, body=_release(write), content=MERGE_PATCH)
        return _result(write, answer)

    async def _present(self, write: CreatePod, path: str, refused: Answer) -> Wrote:
        """The pod that has the name."""
        present = await self._api.call("GET", path)
        if not present.done and present.status != ABSENT:
            return _result(write, present)
        pod = _pod(present.body) if present.done else None
        return Wrote(write=write, outcome="conflict", pod=pod, text=refused.reason, now_ms=wall_ms())


def _result(write: AnyWrite, answer: Answer) -> Wrote:
    now_ms, text = wall_ms(), "" if answer.done else answer.reason
    if answer.done:
        # A deletion that took effect at once is answered with a Status in place of the pod.
        pod = _pod(answer.body)
        return Wrote(write=write, outcome="done", pod=pod if pod.metadata.uid else None, now_ms=now_ms)
    if answer.status in (TOO_MANY, UNAVAILABLE):
        retry_ms = round(answer.retry_after_s * 1_000) or BUSY_MS
        return Wrote(write=write, outcome="busy", text=text, retry_ms=retry_ms, now_ms=now_ms)
    if answer.status >= 500:  # the server failed in the middle of it
        return Wrote(write=write, outcome="unknown", text=text, now_ms=now_ms)
    if answer.status == CONFLICT:
        return Wrote(write=write, outcome="conflict", text=text, now_ms=now_ms)
    if answer.status == ABSENT and f'pods "{write.name}"' in text:
        return Wrote(write=write, outcome="absent", text=text, now_ms=now_ms)
    fenced = any(said in text for said in LOST)
    return Wrote(write=write, outcome="fenced" if fenced else "refused", text=text, now_ms=now_ms)


def _deletion(write: DeletePod) -> dict[str, Any]:
    conditions = {"preconditions": {"uid": write.uid}}
    return {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": write.grace_s, **conditions}


def _release(write: ReleasePod) -> dict[str, Any]:
    about = {"uid": write.uid, "resourceVersion": write.resource_version}
    return {"metadata": {"finalizers": list(write.finalizers), **about}}
