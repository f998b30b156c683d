"""Faulty messages: nonsense, stale and wrong reports, duplicates, cancellations in mid-launch, and holds."""

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.ledger.state.job.job_state import WAITING
from penstock.log.port import Message, Partition
from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCheckpointRequested,
    JobHoldRequested,
    JobProgress,
    JobReleaseRequested,
    NodeJoined,
    NodeLeft,
    NodeSuspected,
    TaskExited,
    TaskStarted,
    WorkProgressed,
)
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from tests.faults.laboratory.injection.injector import Injector
from tests.faults.laboratory.inputs.wire import message, orders_of, unsigned

if TYPE_CHECKING:
    from tests.faults.laboratory.cell import Laboratory

DOUBTFUL = (NodeSuspected.TYPE.encode(), GpuFaulted.TYPE.encode())
"""What makes a node unused until it reports again, also when it comes late."""
JOINED = f"{NodeJoined.TYPE}.v{NodeJoined.VERSION}".encode()


class MessageFaults(Injector):
    """Each public method is a fault, but for `release_all`, by which an operator clears up."""

    def __init__(self, lab: "Laboratory") -> None:
        super().__init__(lab)
        self.held: dict[str, None] = {}
        """Jobs that an operator must release."""

    def garbage(self) -> None:
        """A broken client writes nonsense."""
        topic = INPUT_TOPICS[int(self._world.rng.integers(len(INPUT_TOPICS)))]
        if self._world.rng.random() < 0.5:
            topic = Topic.NODES
        elif self._world.rng.random() < 0.2:
            self._lab.send(Message(orders_of(self._node().machine.node_id), b"garbage"))
        nonsense = [
            *self._stale(),
            Message(Partition(topic, 0), b"\xff\xfe"),
            message(GpuFaulted(node_id="nobody", gpu=0, fault="ecc"), "x", "/nobody"),
        ]
        self._lab.broker.put(self._forged())
        found = nonsense[int(self._world.rng.integers(len(nonsense)))]
        self._lab.send(msgspec.structs.replace(found, partition=Partition(topic, 0)))

    def _stale(self) -> list[Message]:
        """A node restored from an old image reports tasks that live under a newer token."""
        found: list[Message] = []
        for job in self._lab.judge.book.jobs.values():
            for task_id, place in list(job.places.items())[:1]:
                fields: dict[str, Any] = {
                    "node_id": place["node_id"],
                    "task_id": task_id,
                    "token": job.token - 1,
                    "started_ms": 1,
                }
                found.append(message(TaskStarted(**fields, pid=1), "z", "/nobody"))
                found.append(message(TaskExited(**fields, cause="lost", exited_ms=1), "z", "/nobody"))
        return found

    def _forged(self) -> list[Message]:
        """A thief of a task's GPUs reports in its node's name that it has ended, and in an operator's that
        the node has."""
        for job in self._lab.judge.book.jobs.values():
            for task_id, place in list(job.places.items())[:1]:
                fields: dict[str, Any] = {"node_id": place["node_id"], "task_id": task_id, "token": job.token}
                exited = TaskExited(**fields, started_ms=1, cause="exited", exit_code=0, exited_ms=1)
                node = self._lab.judge.replica.state.nodes.get(place["node_id"])
                boot_id = "" if node is None else node.spec.boot_id
                fenced = NodeLeft(node_id=place["node_id"], boot_id=boot_id, proof="fenced", by="mallory")
                return [unsigned(message(event, "z", "/mallory")) for event in (exited, fenced)]
        return []

    def wrong_progress(self) -> None:
        """The estimator tells how long jobs still take, of those that wait too: wrongly, now and then twice;
        and of one that is in no ledger."""
        rng = self._world.rng
        for job_id, job in (*self._lab.judge.replica.state.jobs.items(), ("nobody", None)):
            left_ms = float(rng.integers(0, 90_000))
            bounds = Bounds(middle=left_ms, low=left_ms, high=left_ms)
            eta = EtaEstimated(
                job_id=job_id,
                attempt=1 if job is None else max(1, job.attempt),
                at_ms=0 if job is None else job.submitted_ms,
                done=int(rng.integers(0, 80)),
                left_ms=bounds,
                steps=bounds,
                step_ms=bounds,
                level=0.9,
                source="wrong",
            )
            self._sent += 1
            self._send_maybe_twice(message(eta, f"progress/{self._sent}", "/nobody"))
        unsaid = (JobProgress(job_id="nobody", attained_s=float(rng.integers(0, 80))),)
        self._lab.send(message(WorkProgressed(node_id="n0", jobs=unsaid), "unsaid", "/nobody"))

    def duplicate(self) -> None:
        """Something that was sent long ago comes once more: a mirror, a bridge, a dispatcher that woke up
        late."""
        rng, broker = self._world.rng, self._lab.broker
        partitions = [Partition(topic, 0) for topic in (Topic.NODES, Topic.JOBS, Topic.ESTIMATES)]
        partitions += [orders_of(node_id) for node_id in self._lab.nodes]
        used = [partition for partition in partitions if broker.records(partition)]
        if not used:
            return
        records = broker.records(used[int(rng.integers(len(used)))])
        joins = [record for record in records if ("ce_type", JOINED) in record.headers]
        for _ in range(int(rng.integers(1, 6))):
            among = joins if joins and rng.random() < 0.5 else records
            record = among[int(rng.integers(len(among)))]
            self._lab.send(Message(record.partition, record.value, record.headers, record.key))
            if any(raw.startswith(DOUBTFUL) for _, raw in record.headers):
                self.suspected |= dict.fromkeys(self._lab.nodes)

    def cancel(self) -> None:
        """A user changes his mind, best while his job is being launched; the placer may die over it."""
        lab, rng = self._lab, self._world.rng
        jobs = list(lab.judge.replica.state.jobs.values())
        launching = [job for job in jobs if job.status is JobStatus.LAUNCHING] or jobs
        if launching:
            lab.cancel(launching[int(rng.integers(len(launching)))].job_id)
            for service in lab.placers:
                if rng.random() < 0.4:
                    service.kill("beside a cancellation")

    def save(self) -> None:
        """Running jobs are asked to save; machine, reporter or placer may die meanwhile."""
        rng = self._world.rng
        jobs = [job for job in self._lab.judge.replica.state.jobs.values() if job.status is JobStatus.RUNNING]
        saving = [job for job in jobs if job.spec.checkpoint == "sdk"]
        for _ in range(min(3, len(saving))):
            self._sent += 1
            job = saving[int(rng.integers(len(saving)))]
            asked = JobCheckpointRequested(job_id=job.job_id, reason="before the night", by="operator")
            self._send_maybe_twice(message(asked, f"save/{self._sent}", "/users"))

    def hold(self) -> None:
        """A job is held, by its tenant or an operator, best while it waits, and released; now and then not
        before the calm."""
        rng, state = self._world.rng, self._lab.judge.replica.state
        waiting = [job for job in state.jobs.values() if job.status in WAITING]
        impatient = [job for job in waiting if job.spec.queue_timeout_ms is not None]
        jobs = impatient or waiting or list(state.jobs.values())
        if not jobs:
            return
        job = jobs[int(rng.integers(len(jobs)))]
        tenant = job.spec.owner if rng.random() < 0.5 else None
        self.held[job.job_id] = None
        self._command(
            JobHoldRequested(job_id=job.job_id, reason="no data yet", tenant=tenant, after=state.seq)
        )
        if rng.random() < 0.8:
            self._world.at(self._world.within(1, 90), lambda: self._release(job.job_id, tenant))

    def _release(self, job_id: str, tenant: str | None) -> None:
        after = self._lab.judge.replica.state.seq
        if not self._world.calm:
            self._command(
                JobReleaseRequested(job_id=job_id, reason="here they are", tenant=tenant, after=after)
            )

    def release_all(self) -> None:
        """The operator's last orders, after all that were under way."""
        for job_id in self.held:
            self._command(JobReleaseRequested(job_id=job_id, by="operator", reason="the end of the day"))

    def _command(self, event: JobHoldRequested | JobReleaseRequested) -> None:
        self._sent += 1
        self._send_maybe_twice(message(event, f"command/{self._sent}", "/users"))
