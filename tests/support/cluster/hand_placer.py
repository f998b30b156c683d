"""A placer driven by hand: the real core, each call one record on the ledger's partition.

For tests of everything that reads the ledger; it reads no topic, keeps no term alive and sends no orders.
"""

from collections.abc import Iterable

import numpy as np

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Message, Partition
from penstock.model.decisions.ledger_events import TermStarted, TimerFired
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    JobCancelRequested,
    JobSubmitted,
    NodeJoined,
    TaskExited,
    TaskStarted,
)
from penstock.model.jobs.job_parts import RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.nodes import Gpu, LogServer, NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock_services.placer.core.recorder import Recorder

STORY_RECORDS, STORY_CHARS = 25, 300
MS_PER_INPUT = 10  # how far the ledger's time moves with each input


def in_a_line(value: bytes) -> str:
    """The beginning of a record, for the story of a failed test."""
    return value.decode(errors="replace")[:STORY_CHARS]


def node_spec(
    node_id: str, gpus: int = 4, *, cores: int = 32, boot_id: str = "boot-1", logs: LogServer | None = None
) -> NodeSpec:
    """A node with so many GPUs of 16 GiB."""
    return NodeSpec(
        node_id=node_id,
        boot_id=boot_id,
        logs=logs,
        cores=cores,
        host_memory_mib=256_000,
        gpus=tuple(
            Gpu(index=index, uuid=f"{node_id}-gpu-{index}", model="V100", memory_mib=16_384)
            for index in range(gpus)
        ),
    )


def estimate(gpus: int = 1) -> Estimate:
    """As a user would ask for it."""
    worker = ResourceVector(gpus=gpus, cores=1, host_memory_mib=1_000)
    return Estimate(worker=worker, confidence=1.0, tier="user", source="asked for")


class HandPlacer(Recorder):
    """`values`: every record written so far, valid or not, in order."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.values: list[bytes] = []
        super().__init__(self.values.append)
        self.now_ms = now_ms
        self._sent = 0
        self.feed(TermStarted(term=1, placer_id="hand", settings=PlacerSettings(profile="fifo")))

    @property
    def replica(self) -> Replica:
        """The cell as a follower has it that has read everything."""
        return Replica(self.state, self.head)

    def feed(self, event: Event, event_id: str = "") -> None:
        """Answers one input with one record."""
        self.now_ms += MS_PER_INPUT
        self.record(event, self.now_ms, event_id)

    def join(self, *nodes: NodeSpec) -> None:
        for node in nodes:
            self.feed(NodeJoined(node=node))

    def submit(self, job_id: str, *, gpus: int = 1, spec: JobSpec | None = None) -> None:
        """Submission and estimate: two records; the job is placed if it fits."""
        self.feed(JobSubmitted(job_id=job_id, spec=spec or JobSpec(command=("true",))))
        self.feed(JobEstimated(job_id=job_id, estimate=estimate(gpus)))

    def start(self, job_id: str) -> None:
        """Every task of its current attempt starts."""
        job = self.state.jobs[job_id]
        for number, (task_id, task) in enumerate(job.tasks.items()):
            self.feed(
                TaskStarted(
                    node_id=task.place.node_id,
                    task_id=task_id,
                    token=job.token,
                    pid=4_000 + number,
                    started_ms=self.now_ms,
                )
            )

    def finish(self, job_id: str, exit_code: int = 0) -> None:
        """Every living task of it exits."""
        job = self.state.jobs[job_id]
        for task_id, task in list(job.tasks.items()):
            if task.exit.at_ms is None:
                self.feed(
                    TaskExited(
                        node_id=task.place.node_id,
                        task_id=task_id,
                        token=job.token,
                        cause="exited",
                        exit_code=exit_code,
                        started_ms=self.now_ms,
                        exited_ms=self.now_ms,
                    )
                )

    def fire(self) -> None:
        """Every timer that is due."""
        while (due := self.state.next_timer()) is not None and due[0] <= self.now_ms:
            self.feed(TimerFired(timer_id=due[1]))

    def run(self, job_ids: Iterable[str]) -> None:
        """Submits, starts and finishes jobs one by one."""
        for job_id in job_ids:
            self.submit(job_id)
            self.start(job_id)
            self.finish(job_id)

    def wander(self, rng: np.random.Generator, steps: int) -> None:
        """Random but possible inputs: jobs of several shapes, starts, exits, failures, cancels, lost
        nodes."""
        for _ in range(steps):
            jobs, nodes = list(self.state.jobs), list(self.state.nodes)
            kind = int(rng.integers(12))
            job_id = jobs[int(rng.integers(len(jobs)))] if jobs else None
            job = None if job_id is None else self.state.jobs[job_id]
            if kind < 4 or job is None or job_id is None:
                workers, attempts = int(rng.integers(1, 4)), int(rng.integers(1, 3))
                spec = JobSpec(
                    command=("true",),
                    workers=workers,
                    retry=RetryPolicy(max_attempts=attempts),
                    queue_timeout_ms=500,
                )
                self.submit(f"job-{len(self.values)}", gpus=int(rng.integers(0, 6)), spec=spec)
            elif kind < 8 and job.status == JobStatus.LAUNCHING:
                self.start(job_id)
            elif kind < 10 and job.tasks:
                self.finish(job_id, exit_code=int(rng.integers(2)))
            elif kind == 10:
                self.feed(JobCancelRequested(job_id=job_id))
            elif nodes and rng.integers(4) == 0:
                spec_of = self.state.nodes[nodes[int(rng.integers(len(nodes)))]].spec
                boot = f"boot-{len(self.values)}"
                self.feed(NodeJoined(node=node_spec(spec_of.node_id, int(rng.integers(1, 6)), boot_id=boot)))
            self.fire()

    def story(self) -> str:
        """Its last records, each shortened to one line."""
        return "\n".join(map(in_a_line, self.values[-STORY_RECORDS:]))

    async def send(self, log: Log, cell_index: int = 0) -> int:
        """Appends what was not yet sent; returns the number of records."""
        fresh = self.values[self._sent :]
        self._sent = len(self.values)
        ledger = Partition(Topic.LEDGER, cell_index)
        if fresh:
            await log.append([Message(ledger, value) for value in fresh])
        return len(fresh)
