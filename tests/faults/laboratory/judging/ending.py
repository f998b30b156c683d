"""Services that die for good, and the judge of what they leave behind: everything temporary ends (LAW 7).

In such a run services are killed at a random moment and never come back, the placer is killed and comes back,
and every other job outlasts whatever a service may have done for a time. Rule `ends`: once it is calm nothing
temporary is older than its bound, no job waits that could run, and an operator who brings the estimator back
at last sees all jobs come to their ends.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.ledger.state.job.job_state import JobState, TaskState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import ADJUSTED_FOR_MS
from penstock.model.inputs.external_events import NodeSuspected
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.scheduling.liveness import stalled
from tests.faults.laboratory.inputs.jobs import SUCCEEDED, SimulatedJob
from tests.faults.laboratory.machines.process import Service
from tests.faults.laboratory.proposers.adjuster import OPERATOR
from tests.faults.rules.findings import Violation

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

RULE = "ends"
RANDOM = "random"
REPORTER = "node-reporter"
"""Of one node, which is silent from then on."""
NAMES = ("batcher", "migrator", "contention-guard", "estimator", REPORTER)
PROFILES = (None, "penstock", None, "coda")
"""By seed; None: the run's own. Services adjust running tasks under these two alone."""
MOMENT = (0.2, 1.0)
"""Of the faulty phase: when they die."""
ADJUSTED_S = ADJUSTED_FOR_MS / 1_000
TIMERS_S = 30.0
"""Of calm, from a timer's time to what follows from it, orders and answers with it."""
UNDERWAY_S = 300.0
"""A launch, a stop, a move or a silent node, with time-outs, leases and probes one after another: no sound
run of 270 took as long."""
FOUND_S = 5.0
"""For a job that could start."""
LOOKED_S = ADJUSTED_S + 4 * TIMERS_S
"""Of calm, after which nothing temporary is left of services that are dead."""
LASTS_S = 1_600.0
"""Longer than the faulty phase and all of that."""
ENDS_WITHIN_S = 8_000.0
"""Of calm: jobs that last may run one after another."""


class Temporary(NamedTuple):
    """Something that must end."""

    key: tuple[object, ...]
    """A renewal has another one."""
    bound_s: float
    text: str


def lasting(jobs: Sequence[SimulatedJob]) -> list[SimulatedJob]:
    """Every other job that succeeds lasts."""
    return [
        job._replace(duration_s=job.duration_s + LASTS_S)
        if number % 2 == 0 and job.allowed == (SUCCEEDED,)
        else job
        for number, job in enumerate(jobs)
    ]


class Ending:
    """Kills services for good, and looks from time to time when it is calm."""

    def __init__(self, lab: "Laboratory", given: str, seed: int) -> None:
        """`given`: comma-separated of `NAMES`, or `RANDOM`."""
        self._lab, self._world = lab, lab.world
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, 0xE4D))))
        there = [name for name in NAMES if name in (*lab.watchers, "batcher", "estimator", REPORTER)]
        self.lost = [name for name in NAMES if name in given.split(",")]
        if given == RANDOM:
            some = int(rng.integers(1, len(there) + 1)) if rng.random() < 0.5 else 1
            self.lost = [there[int(number)] for number in sorted(rng.permutation(len(there))[:some])]
        nodes = list(lab.nodes.values())
        self._node = nodes[int(rng.integers(len(nodes)))]
        self._since: dict[tuple[object, ...], float] = {}
        self.left = 0
        """Throttles, probes and changes of cores that there were when their service died."""
        for name in self.lost:
            lab.world.at(float(rng.uniform(*MOMENT)) * lab.storm_s, partial(self._kill, name))

    def _kill(self, name: str) -> None:
        """And the placer in office with it, which comes back."""
        if name == "contention-guard":
            self.left += sum(found.key[0] == "adjusted" for found in temporary(self._lab.judge.replica.state))
        if name == REPORTER:
            self._choose_lost()
        self._service(name).end_for_good()
        serving = self._lab.serving()
        if serving is not None:
            serving.kill("it dies with another service")
        if name == REPORTER:
            self._node.machine.silent = True
            self._suspect()

    def _choose_lost(self) -> None:
        """One that is lost already, where there is one: the cell freezes when more of a few are."""
        nodes = self._lab.nodes.values()
        self._node = next((node for node in nodes if node.machine.destroyed), self._node)

    def _service(self, name: str) -> Service:
        if name == REPORTER:
            return self._node.reporter
        return {"batcher": self._lab.batcher, "estimator": self._lab.estimator, **self._lab.watchers}[name]

    def calm(self, last_messages_s: float) -> None:
        """It is calm, and the latest messages come within so many seconds."""
        if REPORTER in self.lost and self._lab.judge.has_lost and self._node.machine.up:
            # No lease proves the end of what a lost ledger may have placed (decision 40): an operator does.
            self._node.machine.destroyed = True
            self._node.power_off(power_loss=True)
        self._suspect()
        self._world.at(last_messages_s + LOOKED_S, self._repair)

    def _suspect(self) -> None:
        """The gateway reports that the connection of the silent node is broken."""
        if REPORTER in self.lost and self._node.machine.silent:
            self._lab.nemesis.report(NodeSuspected(node_id=self._node.machine.node_id, reason="it is silent"))

    def _repair(self) -> None:
        """At last an operator brings the estimator back: jobs without an estimate wait for nothing else."""
        if "estimator" not in self.lost:
            return
        waits = [
            job for job in self._lab.judge.replica.state.jobs.values() if job.in_line and job.estimate is None
        ]
        if waits:
            raise Violation(RULE, f"{waits} are in the queue without an estimate")
        self._service("estimator").come_back()

    def look(self, calm_s: float) -> None:
        """It has been calm since this moment."""
        state, now_s = self._lab.judge.replica.state, self._world.now_s
        found = {}
        for measure in temporary(state):
            since_s = max(calm_s, self._since.get(measure.key, now_s))
            found[measure.key] = since_s
            if now_s - since_s > measure.bound_s:
                raise Violation(
                    RULE, f"{measure.text}: for {now_s - since_s:.0f} s of calm; dead: {self.lost}"
                )
        self._since = found


def temporary(state: CellState) -> Iterator[Temporary]:
    """All that a service or a decision has made for a time only."""
    for job in state.jobs.values():
        yield from _of_job(state, job)
    if state.window_until_ms:
        bound_s = state.settings.batch_window_ms / 1_000 + TIMERS_S
        yield Temporary(("window", state.window_until_ms), bound_s, "a batch window is open")
    for job_id, unit in state.planned.items():
        if unit.proposed is not None:
            yield Temporary(("unit", job_id, unit.proposed.of), UNDERWAY_S, f"nodes are reserved: {unit}")
        elif not any(state.nodes[node_id].tasks for node_id in unit.nodes if node_id in state.nodes):
            yield Temporary(("reserved", job_id, unit.nodes), TIMERS_S, f"nothing is awaited for {unit}")
    for node_id, node in state.nodes.items():
        if node.status is NodeStatus.SUSPECT:
            yield Temporary(("suspect", node_id), UNDERWAY_S, f"{node_id} is suspect")
        if node.cordon is not None:
            yield Temporary(("cordon", node_id), UNDERWAY_S, f"{node_id} is cordoned by {node.cordon.by}")
    if state.frozen:
        yield Temporary(("frozen",), UNDERWAY_S, f"the cell is frozen: {state.frozen}")
    stall = stalled(state)
    if stall is not None:
        yield Temporary(("stalled", stall.job_id), FOUND_S, f"{stall}")


def _of_job(state: CellState, job: JobState) -> Iterator[Temporary]:
    about = job.job_id, job.attempt
    if job.held is not None:
        yield Temporary(("held", *about), UNDERWAY_S, f"{job.job_id} is held by {job.held.by}")
    if job.target:
        yield Temporary(("move", *about), UNDERWAY_S, f"{job.job_id} is on its way to {job.target}")
    if job.status in (JobStatus.LAUNCHING, JobStatus.STOPPING, JobStatus.BACKOFF):
        after = job.succession.after
        bound_s = UNDERWAY_S * (1 + bool(after))
        yield Temporary((job.status, *about), bound_s, f"{job.job_id} is {job.status}, after {after}")
    if job.status is JobStatus.RUNNING:
        for task in job.tasks.values():
            yield from _of_task(state, job, task)


def _of_task(state: CellState, job: JobState, task: TaskState) -> Iterator[Temporary]:
    """What an operator has set stays. Cores come back when its node has free ones."""
    task_id, about = task.place.task_id, (job.job_id, job.attempt)
    if task.status is not TaskStatus.RUNNING:
        return
    cap, cores = task.bandwidth_adjusted, task.cores.adjusted
    if task.memory_bandwidth_percent is not None and (cap is None or cap.by != OPERATOR):
        at_ms = None if cap is None else cap.at_ms
        text = f"{task_id} is capped at {task.memory_bandwidth_percent} %"
        yield Temporary(("adjusted", "bandwidth", task_id, *about, at_ms), ADJUSTED_S + TIMERS_S, text)
    if cores is None or cores.by == OPERATOR:
        return
    key = ("adjusted", "cores", task_id, *about, cores.at_ms)
    count, free = len(task.place.cores), state.nodes[task.place.node_id].free_core_mask.bit_count()
    own = task.cores.throttled_from or (count if task.cores.settled else task.cores.placed)
    if task.cores.trial or count > own or (count < own and free):
        used = len(task.used_cores)
        yield Temporary(key, ADJUSTED_S + TIMERS_S, f"{task_id} has {used} of its {own} cores by {cores.by}")
