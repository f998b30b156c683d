"""Telemetry of simulated nodes: losses, step times and memory traffic, published like by node-reporters, on
changes.

The placer does not read telemetry: it goes to the simulated and the attached services of the cell.
"""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.ledger.state.state import CellState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.scheduling.acting.settling import AGREES
from penstock.simulator.job_models.model import LossReport, Pace
from penstock.simulator.services.port import Services
from penstock.simulator.services.simulated_services import SimulatedService
from penstock.simulator.task_reports.loss_reports import LossReports

STEP_MS = 1_000.0
"""Step time on the requested resources of a job whose trace has no iterations. An assumption: only its ratio
to others matters."""
TRAFFIC_POINTS = 5.0
"""Change in percent of a node's memory bandwidth at which it is published again. An assumption."""


WINDOW_S = 2.0
"""From a change to the measured step time of a training: a window of the SDK (`penstock.sdk.progress`)."""


class _Published(NamedTuple):
    """The last published values of one task."""

    step_ms: float
    cores: int


class Telemetry:
    """Telemetry of all nodes."""

    def __init__(self, simulated: Sequence[SimulatedService], services: Services | None) -> None:
        self._simulated, self._services = simulated, services
        self._losses = LossReports()
        self._steps: dict[str, _Published] = {}
        """Last published step times by task id."""
        self._measured: dict[str, tuple[float, Pace]] = {}
        """Job → time at which its present step time is measured, in order of time."""
        self._takes: dict[str, dict[str, float]] = {}
        """Node → job → share of the bandwidth that it uses."""
        self._taken: dict[str, Sequence[str]] = {}
        """Job → the nodes whose bandwidth it uses."""
        self._traffic: dict[str, float] = {}
        """Node or task → percent published last."""

    def over(self, task_id: str) -> None:
        """The task has ended."""
        self._losses.over(task_id)
        self._steps.pop(task_id, None)
        self._traffic.pop(task_id, None)

    def loss(self, report: LossReport, state: CellState, now_ms: int) -> None:
        """Publishes a loss report of a job's chief, if it passes the filter."""
        sample = self._losses.sample(report, state.jobs[report.job_id])
        if sample is not None:
            self._send(sample, state, now_ms)

    def next_s(self) -> float | None:
        """Time of the next measured step time."""
        return next((at_s for at_s, _ in self._measured.values()), None)

    def due(self, state: CellState, now_s: float, now_ms: int) -> bool:
        """Publishes the next step time that is measured by now; whether there was one."""
        job_id = next(iter(self._measured), "")
        if not job_id or self._measured[job_id][0] > now_s:
            return False
        self._task(self._measured.pop(job_id)[1], state, now_ms)
        return True

    def paces(self, paces: Sequence[Pace], state: CellState, now_s: float, now_ms: int) -> None:
        """Takes the jobs' speeds from now on, and their use of their nodes' bandwidth."""
        touched: dict[str, None] = {}
        for pace in paces:
            for node_id in self._taken.pop(pace.job_id, ()):
                del self._takes[node_id][pace.job_id]
                touched[node_id] = None
            if pace.traffic:
                self._taken[pace.job_id] = tuple(pace.traffic)
            for node_id, takes in pace.traffic.items():
                self._takes.setdefault(node_id, {})[pace.job_id] = takes
                touched[node_id] = None
        for node_id in touched:
            self._node(node_id, state, now_ms)
        for pace in paces:
            self._takes_of(pace, state, now_ms)
        for pace in paces:
            self._measured.pop(pace.job_id, None)
            if pace.job.gpus and pace.speed > 0:
                self._measured[pace.job_id] = now_s + WINDOW_S, pace

    def _node(self, node_id: str, state: CellState, now_ms: int) -> None:
        percent = 100 * sum(self._takes[node_id].values())
        if abs(percent - self._traffic.get(node_id, 0.0)) < TRAFFIC_POINTS:
            return
        self._traffic[node_id] = percent
        self._send(
            TelemetrySampled(node_id=node_id, at_ms=now_ms, memory_bandwidth_percent=percent), state, now_ms
        )

    def _takes_of(self, pace: Pace, state: CellState, now_ms: int) -> None:
        """Publishes the use of each task of a job without GPUs:
        an equal part of the job's use of its node."""
        job = state.jobs.get(pace.job_id)
        if job is None or pace.job.gpus:
            return
        for task_id, task in job.tasks.items():
            node_id = task.place.node_id
            beside = sum(other.place.node_id == node_id for other in job.tasks.values())
            percent = 100 * pace.traffic.get(node_id, 0.0) / beside
            if abs(percent - self._traffic.get(task_id, 0.0)) < TRAFFIC_POINTS:
                continue
            self._traffic[task_id] = percent
            sample = TelemetrySampled(
                node_id=node_id, task_id=task_id, at_ms=now_ms, memory_bandwidth_percent=percent
            )
            self._send(sample, state, now_ms)

    def _task(self, pace: Pace, state: CellState, now_ms: int) -> None:
        """Publishes the step time of a training's chief:
        once after each change of its cores, else if it differs."""
        job = state.jobs.get(pace.job_id)
        if job is None or not job.tasks:
            return
        task_id, task = next(iter(job.tasks.items()))
        alone_ms = 1_000 * pace.work_s / pace.job.iterations if pace.job.iterations else STEP_MS
        found = _Published(alone_ms / pace.speed, len(task.used_cores))
        last = self._steps.get(task_id)
        if (
            last is not None
            and last.cores == found.cores
            and abs(found.step_ms - last.step_ms) < AGREES * last.step_ms
        ):
            return
        self._steps[task_id] = found
        self._send(
            TelemetrySampled(
                node_id=task.place.node_id, task_id=task_id, at_ms=now_ms, step_ms=found.step_ms
            ),
            state,
            now_ms,
        )

    def _send(self, sample: TelemetrySampled, state: CellState, now_ms: int) -> None:
        for service in self._simulated:
            service.observe(state, sample, now_ms)
        if self._services is not None:
            self._services.deliver(sample)
