"""A part of the demo with jobs of its own: a service acts on them while they run. It begins when all other
jobs have ended.

Common to all parts: the nodes of its jobs, waiting for events, and lines for the screen and the summary. A
part waits for what is to be shown as long
as that takes: on a busy machine it takes longer, and shows the same. What this machine cannot show at all is
left out, with the reason.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

from penstock.local.demo.demo_jobs import DemoJob

SUBMITTED, STARTED, STEPS = "penstock.job.submitted", "penstock.task.started", "penstock.steps.measured"
ENDED = "penstock.job.ended"

Event: TypeAlias = Mapping[str, Any]
Say: TypeAlias = Callable[[str], None]
"""Shows a line."""


class Cell(Protocol):
    """The demo's installation, through its gateway."""

    @property
    def nodes(self) -> Collection[Mapping[str, Any]]:
        """Their rows."""
        ...

    async def submit(self, job: DemoJob) -> None: ...

    async def cancel(self, job_id: str) -> None: ...

    async def why(self, job_id: str) -> Mapping[str, Any]:
        """As `penstock why`."""
        ...


class Part(ABC):
    """`jobs`: all that it submits; `run` ends them, too. `end`: ends the trainings that run until then."""

    WORD: ClassVar[str]
    """Before each line: who acts."""

    def __init__(self, jobs: Collection[DemoJob], end: Callable[[], None], say: Say) -> None:
        self._end, self._say = end, say
        self._names = {job.spec.name for job in jobs}
        self._ids: dict[str, str] = {}
        """Name → job id."""
        self._nodes: dict[str, str] = {}
        """Name → where it started last."""
        self._ended: set[str] = set()
        self._lines: list[str] = []
        self._changed = asyncio.Event()
        self.wrong: list[str] = []
        """What did not come as expected, one line each."""
        self.left_out = ""
        """Why nothing was shown; empty: it was, or is not over."""

    @property
    def lines(self) -> list[str]:
        """What there is to see, one line each."""
        return self._lines or [f"left out: {self.left_out}"]

    @abstractmethod
    async def run(self, cell: Cell) -> None:
        """To the end of all its jobs."""

    @abstractmethod
    def _observe_own(self, name: str, event: Event) -> bool:
        """An event of the job of this name, once what is common to all parts is known.
        Whether it is shown by that."""

    def _observe_cell(self, event: Event) -> None:  # noqa: B027 - most parts need none
        """An event that is about no single job."""

    def observe(self, event: Event) -> bool:
        """One of the stream, of any job or none. Whether it is shown by that."""
        kind, data = event["type"], event["data"]
        if event.get("job_id") is None:
            self._observe_cell(event)
            self._changed.set()
            return False
        if kind == SUBMITTED and (name := data["spec"]["name"]) in self._names:
            self._ids[name] = event["job_id"]  # which the answer to the submission may bring later
        name = next((name for name, job_id in self._ids.items() if job_id == event["job_id"]), "")
        if not name:
            return False
        if kind == STARTED:
            self._nodes[name] = data["node_id"]
        elif kind == ENDED:
            self._ended.add(name)
        shown = self._observe_own(name, event)
        self._changed.set()
        return shown

    def named(self, text: str) -> str:
        """With its jobs' names in place of the ids of jobs and tasks."""
        for name, job_id in self._ids.items():
            text = re.sub(rf"{re.escape(job_id)}(\.\d+\.\w+)?", name, text)
        return text

    def _show(self, line: str) -> None:
        """One more for the summary, shown at once."""
        self._lines.append(line)
        self._say(line)

    def _leave_out(self, reason: str) -> None:
        if reason:
            self.left_out = reason
            self._say(f"left out: {reason}")

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Returns when it does; looked at after each event."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()
