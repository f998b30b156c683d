"""The demo's last part: a training beside a job that takes all the cores that it can have, on one node.

The contention-guard takes cores from that job when the training's steps have become slower than they were
alone, and gives them back when the training has ended. All of it is awaited, however long it takes on a busy
machine. What this machine cannot show is left out, with the reason.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from penstock.cli.following.event_text import asked
from penstock.cli.queries.tables import measures
from penstock.local.demo.demo_jobs import DemoJob
from penstock.local.demo.demo_part import STEPS, Cell, Event, Part, Say
from penstock.scheduling.acting.settling import Settling
from penstock.scheduling.acting.telemetry_windows import WINDOW_MS, Latest, TaskWindow
from penstock.text.counting import count

MARGIN = 2  # reports of the training: the guard's windows begin at other moments than those of this module
ACTS = 30
"""So many reports of the training, two seconds each or more, the guard takes at most until it finds its steps
longer; two are usual."""
# so long the training goes on beside fewer cores; where they are too many still, the guard takes more
SHOWN_S = 4.0
PLACED, CORES = "penstock.placement.decided", "penstock.cores.decided"


class Machine(NamedTuple):
    """Where the demo runs. `eliminates`: whether the profile's guard slows jobs without GPUs."""

    usable_cores: int
    profile: str
    eliminates: bool

    def left_out(self, nodes: Collection[Mapping[str, Any]]) -> str:
        """Why nothing can be shown here; empty: it can. `nodes`: the gateway's rows."""
        if not self.eliminates:
            return f"profile {self.profile} slows no jobs; the default one does"
        if self.usable_cores < 2:
            return "this machine has one core, and a job that is slowed needs another one than the training"
        for node in sorted(nodes, key=lambda node: str(node["node_id"])):
            known = node.get("measures") or {}
            if known.get("contention", "none") == "none" or known["memory_bandwidth"] != "none":
                return (
                    f"{node['node_id']} measures {measures(node)}; a job that takes cores is found by "
                    "threads that wait for a core"
                )
            if others_cores(node) < self.usable_cores:
                return (
                    f"{node['node_id']} gives out {count(node['cores'], 'core')} and the machine has "
                    f"{self.usable_cores}, so two jobs meet on none"
                )
        return ""


def others_cores(node: Mapping[str, Any]) -> int:
    """Cores of a node that a training with one core leaves to others."""
    return int(node["cores"]) - 1


class Alone:
    """Whether the speed of a training is known: by the guard's own rules, from what the training has
    reported.

    It has settled, or so many reports have differed that the slowest of them counts.
    """

    def __init__(self) -> None:
        self._settling = Settling()
        self._steps, self._passed_ms = 0, 0.0

    def observe(self, at_ms: int, data: Mapping[str, Any]) -> None:
        """A report of steps."""
        self._steps += data.get("steps") or 0
        self._passed_ms += (data.get("steps") or 0) * (data.get("step_ms") or 0.0)
        if self._steps and self._passed_ms >= WINDOW_MS:
            step = Latest(at_ms, "", self._passed_ms / self._steps)
            self._settling.observe(at_ms, TaskWindow(step_ms=step), at_ms)
            self._steps, self._passed_ms = 0, 0.0

    def known(self, at_ms: int) -> bool:
        return self._settling.settled(at_ms) is not None or self._settling.gave_up


class GuardPart(Part):
    """A training, and a job without GPUs that is to lose cores to it."""

    WORD = "guard"

    def __init__(
        self, training: DemoJob, other: DemoJob, machine: Machine, end: Callable[[], None], say: Say
    ) -> None:
        super().__init__((training, other), end, say)
        self.training, self.other = training, other
        self._machine = machine
        self._alone = Alone()
        self._at_ms = 0
        self._reports = 0
        """Of the training's steps."""
        self._cores = 0
        """That the other job has."""
        self._slowed = False
        """Whether it has not got them back."""

    def _observe_own(self, name: str, event: Event) -> bool:
        kind, data = event["type"], event["data"]
        self._at_ms = max(self._at_ms, event["at_ms"])
        if kind == STEPS and name == self.training.spec.name:
            self._alone.observe(event["at_ms"], data)
            self._reports += 1
        elif kind == PLACED and name == self.other.spec.name:
            self._cores = len(data["tasks"][0]["cores"])
        changes = kind == CORES and name == self.other.spec.name
        if changes:
            self._change(name, data)
        return changes

    def _change(self, name: str, data: Mapping[str, Any]) -> None:
        """Of the other job's cores."""
        now, self._slowed = len(data["cores"]), data["cause"] == "contention"
        self._show(f"{name}: {self._cores} → {count(now, 'core')}, {self.named(asked(data))}")
        self._cores = now

    async def run(self, cell: Cell) -> None:
        """As of `Part`."""
        self._leave_out(self._machine.left_out(cell.nodes))
        if self.left_out:
            return
        other = self.other.spec.name
        if alone := await self._runs_alone(cell):
            self._say(f"now {other} begins beside it, with a busy process on each core that it gets")
            await cell.submit(self.other)
            await self._slows()
        self._end()
        await self._until(lambda: self._over)
        if alone:
            await self._until(lambda: other in self._ids)
            await self._until(lambda: not self._slowed or other in self._ended)
            if other not in self._ended:
                await cell.cancel(self._ids[other])

    async def _runs_alone(self, cell: Cell) -> bool:
        """Whether the training's speed is known then."""
        name = self.training.spec.name
        self._say(f"{name} runs alone first, until its steps take equally long, so that its speed is known")
        await cell.submit(self.training)
        await self._until(lambda: self._alone.known(self._at_ms) or self._over)
        await self._more_reports(MARGIN)
        if self._over:
            self._leave_out(f"{name} has ended before its speed was known")
        return not self.left_out

    async def _more_reports(self, count: int) -> None:
        """Until the training has reported so many times more, or has ended."""
        most = self._reports + count
        await self._until(lambda: self._reports >= most or self._over)

    async def _slows(self) -> None:
        """Until the other job has lost cores."""
        training, other = self.training.spec.name, self.other.spec.name
        await self._until(lambda: other in self._nodes or self._over or other in self._ended)
        if other in self._nodes and self._nodes[training] != self._nodes[other]:
            self._leave_out(f"{training} and {other} were not on one node")
            return
        most = self._reports + ACTS
        await self._until(lambda: self._slowed or self._over or other in self._ended or self._reports >= most)
        if self._slowed:
            await asyncio.sleep(SHOWN_S)
        elif self._over or other in self._ended:
            self._leave_out(f"{training if self._over else other} has ended before the guard slowed {other}")
        else:
            self._leave_out(
                f"in {ACTS} reports the guard did not find the steps of {training} a tenth longer than alone"
            )

    @property
    def _over(self) -> bool:
        """Whether the training is."""
        return self.training.spec.name in self._ended
