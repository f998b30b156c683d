"""Driving the demo: submitting, listening and looking, all through the gateway and side by side."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import httpx_sse

from penstock.cli.following.event_text import QUIET
from penstock.errors import PenstockError
from penstock.local.demo.demo_jobs import DemoJob
from penstock.local.demo.demo_part import ENDED, STARTED, Part
from penstock.local.demo.demo_screen import Show
from penstock.model.wire.codec import as_written

TICK_S = 0.5  # running times on the screen; the gateway is asked only when an event brings a change
BURST_S = 0.1  # events of so long lead to one look
REQUEST_TIMEOUT_S = 60.0  # a gateway that hangs; on a busy machine an answer takes seconds


class DemoFailed(PenstockError):
    """The demo could not be carried through; the message gives the reason."""


async def drive(url: str, jobs: Sequence[DemoJob], part: Part | None, show: Show) -> None:
    """Submits and watches everything to its end, `part` after the jobs,
    and asks `why` of each job. Raises `DemoFailed`."""
    try:
        async with httpx.AsyncClient(
            base_url=url, timeout=REQUEST_TIMEOUT_S, trust_env=False, event_hooks={"response": [_check]}
        ) as http:
            driver = _Driver(http, show, part)
            with show.screen():
                await driver.run(jobs)
            for job_id in show.jobs:
                show.why[job_id] = await driver.why(job_id)
    except* httpx.HTTPError as group:
        first = group.exceptions[0]
        raise DemoFailed(f"the gateway does not answer as it should: {first!r}") from group


async def _check(response: httpx.Response) -> None:
    response.raise_for_status()


class _Driver:
    """A `penstock.local.demo.demo_part.Cell`, too."""

    def __init__(self, http: httpx.AsyncClient, show: Show, part: Part | None) -> None:
        self._http = http
        self._show = show
        self._part = part
        self._changed = asyncio.Event()
        self._started: set[str] = set()
        self._over: dict[str, asyncio.Event] = {}

    async def run(self, jobs: Sequence[DemoJob]) -> None:
        self._over = {job.spec.name: asyncio.Event() for job in jobs}
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(group))
            began_s = time.perf_counter()
            work = [group.create_task(self._in_time(job, began_s)) for job in jobs]
            work.append(group.create_task(self._last()))
            while not all(task.done() for task in work) or self._show.jobs.keys() - self._show.ended:
                try:
                    await asyncio.wait_for(self._changed.wait(), TICK_S)
                except TimeoutError:
                    pass
                else:
                    await asyncio.sleep(BURST_S)
                    self._changed.clear()
                    await self._look()
                self._show.draw()
            await self._look()
            self._show.draw()
            listening.cancel()

    async def _in_time(self, job: DemoJob, began_s: float) -> None:
        """Or when the job that it waits for has ended."""
        await asyncio.sleep(max(0.0, began_s + job.after_s - time.perf_counter()))
        if job.after_job is not None:
            await self._over[job.after_job].wait()
        await self.submit(job)

    async def submit(self, job: DemoJob) -> None:
        key = {"Idempotency-Key": f"demo-{job.spec.name}"}
        response = await self._http.post("/v1/jobs", json=as_written(job.spec), headers=key)
        self._show.jobs[str(response.json()["job_id"])] = job
        self._changed.set()

    async def _last(self) -> None:
        """The part, when no other job runs any more."""
        if self._part is None:
            return
        for over in self._over.values():
            await over.wait()
        await self._look()
        await self._part.run(self)
        self._show.lines, self._show.wrong = self._part.lines, self._part.wrong

    async def _listen(self, group: asyncio.TaskGroup) -> None:
        """The gateway's stream, from its beginning; again from the last event when the gateway has ended it,
        as it does when its database is down."""
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, read=None)
        last = "0"
        while True:
            async with httpx_sse.aconnect_sse(
                self._http, "GET", "/v1/stream", headers={"Last-Event-ID": last}, timeout=timeout
            ) as source:
                async for sse in source.aiter_sse():
                    if sse.data:  # a frame may only set the time to reconnect
                        last = sse.id
                        self._take(json.loads(sse.data), group)
            await asyncio.sleep(TICK_S)

    def _take(self, event: Mapping[str, Any], group: asyncio.TaskGroup) -> None:
        job_id = event.get("job_id")
        if job_id is None:
            if self._part is not None:
                self._part.observe(event)
            return
        if event["type"] in QUIET:
            return
        if self._part is None or not self._part.observe(event):
            self._show.print_event(event)
        job = self._show.jobs.get(job_id)
        if event["type"] == STARTED and job is not None and job_id not in self._started:
            self._started.add(job_id)
            if job.cancel_after_s is not None:
                group.create_task(self._cancel_after(job_id, job.cancel_after_s))
        if event["type"] == ENDED:
            self._show.ended.add(job_id)
            if job is not None and job.spec.name in self._over:
                self._over[job.spec.name].set()
        self._changed.set()

    async def _cancel_after(self, job_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.cancel(job_id)

    async def cancel(self, job_id: str) -> None:
        reason = {"reason": "the demo has seen enough of it"}
        await self._http.post(f"/v1/jobs/{job_id}/cancel", json=reason)

    async def why(self, job_id: str) -> Mapping[str, Any]:
        """The gateway's answer."""
        found: Mapping[str, Any] = (await self._http.get(f"/v1/jobs/{job_id}/why")).json()
        return found

    @property
    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """Rows at the latest look."""
        return self._show.nodes

    async def _look(self) -> None:
        """The gateway's rows as they are now."""
        jobs = (await self._http.get("/v1/jobs?limit=100")).json()["jobs"]
        self._show.rows = {row["job_id"]: row for row in jobs}
        self._show.nodes = (await self._http.get("/v1/nodes")).json()["nodes"]
