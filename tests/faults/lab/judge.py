"""The judge: sees the bytes of the ledger and what machines really do, and believes no service.

Its reading of the chain is its own, so that a fault in the product's cannot hide itself. Every valid record is
folded fact by fact, each looked at before and after; after every record all invariants are checked.

Judges, by the name under which a violation is told: `law2` (each input exactly one record), `time` (the ledger's time
never goes back), `check` (the cell's invariants), `placement` (only on what is there, whole gangs, when nothing of the job
lives), `proof` (nothing is freed while it lives), `freeze` (no mass eviction), `outcome` (each job ends once, and rightly),
`order` (orders and processes follow from valid records alone), `gpu` (a GPU is not overcommitted), `attempt` (one
attempt of a job at a time, no task twice), `token` (tokens never go back), `signal` (nobody is stopped unasked).
`estimate`: one per job. `fold`, `replay`, `liveness` and `rest` are judged at the end of a life.
"""

from collections.abc import Callable, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import orjson

from penstock.ledger.check import check
from penstock.ledger.evolve import begin, evolve
from penstock.ledger.record import NO_PARENT, TERM_STARTED, Head, read
from penstock.ledger.state import CellState, JobState, NodeState
from penstock.model import external_events, ledger_events
from penstock.model.event import Event
from penstock.model.ledger_events import Order, StartTask
from penstock.model.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.types import WHOLE_GPU, ResourceVector, TaskPlacement
from penstock_services.placer.core.decide import MAX_LOSSES
from tests.faults.lab.jobs import CANCELLED, FAILED, SUCCEEDED, UNSCHEDULABLE
from tests.faults.lab.log import Partition, Record
from tests.faults.lab.machine import Key, Machine, Program
from tests.faults.lab.world import World

FINAL_STOPS = ("cancelled", "completed", "run_timeout")
SNAPSHOT_EVERY = 25  # valid records


class Violation(Exception):
    """Something that must never happen has happened; `judge` names the rule."""

    def __init__(self, judge: str, what: str) -> None:
        super().__init__(f"{judge}: {what}")
        self.judge = judge
        self.what = what


class Judge:
    """`machines` and `programs` are what really is; both are filled by the life."""

    def __init__(self, world: World, inputs: Mapping[str, Partition]) -> None:
        self.world = world
        self.state = CellState()
        self.head = Head(0, NO_PARENT, 0)
        self.machines: dict[str, Machine] = {}
        self.programs: dict[str, Program] = {}
        self.submitted: dict[str, None] = {}
        """Jobs whose submission is in the log."""
        self.ended: dict[str, str] = {}
        self.void = 0
        self.records = 0
        self.froze = 0
        self.refused: dict[str, int] = {}
        """Reason → inputs rejected with it."""
        self.placed: dict[tuple[int, str], StartTask] = {}
        """(token, task id) → the order that follows from it."""
        self.read: dict[tuple[int, str], None] = {}
        """Of them, those that their node has read."""
        self.cancelled: dict[str, None] = {}
        """Jobs that somebody asked to cancel in mid-air."""
        self._stops: dict[tuple[int, str], None] = {}
        self._answered: dict[str, int] = {}
        self._inputs = inputs
        self._submissions: dict[str, None] = {}
        self._estimates: dict[str, None] = {}
        self._started: dict[Key, None] = {}
        self._gpu_tokens: dict[tuple[str, int], int] = {}
        self._left: dict[str, tuple[int, str]] = {}
        """Node → (ledger time, proof) of its latest departure."""
        self._told_started: dict[Key, None] = {}
        self._slandered: dict[str, None] = {}
        """Machines that run although the cell was sworn that they do not, until they join again."""
        self._disowned: dict[Key, None] = {}
        """Processes on them: the cell has given them up, wrongly, and cannot know of them."""
        self._cause: Event | None = None

    # ------------------------------------------------------------------------------------- the ledger

    def ledger(self, value: bytes) -> bool:
        """One record of the ledger's partition; whether it is valid."""
        try:
            found = orjson.loads(value)
        except orjson.JSONDecodeError:
            self.void += 1
            return False
        starts_term = bool(found["facts"]) and found["facts"][0]["type"] == TERM_STARTED
        if (
            found["seq"] != self.head.seq + 1
            or found["parent"] != self.head.id
            or found["term"] != self.head.term + starts_term
        ):
            self.void += 1
            return False
        self.head = Head(found["seq"], sha256(value).hexdigest()[:32], found["term"])
        self.records += 1
        if found["now_ms"] < self.state.now_ms:
            raise Violation("time", f"seq {self.head.seq}: {found['now_ms']} after {self.state.now_ms}")
        self._law2(found)
        begin(self.state, found["seq"], found["now_ms"], found["term"])
        if (topic := found["cause"].get("topic")) is not None:
            self.state.positions[topic, 0] = found["cause"]["offset"] + 1
        self._cause = None
        for fact in read(value).facts:
            event = fact.event()
            self._cause = self._cause or event
            before = BEFORE.get(event.TYPE)
            if before is not None:
                before(self, event)
            evolve(self.state, event)
            if event.TYPE in TOLD:
                self.world.tell(f"seq {self.head.seq}: {TOLD[event.TYPE](event)}")
            if event.TYPE == ledger_events.JobEnded.TYPE:
                self._no_timers(event)
        problems = check(self.state)
        if problems:
            raise Violation("check", f"seq {self.head.seq}: {'; '.join(problems)}")
        return True

    def _no_timers(self, fact: Any) -> None:
        left = [timer_id for timer_id, timer in self.state.timers.items() if timer.about.id == fact.job_id]
        if left:
            raise Violation("rest", f"seq {self.head.seq}: {fact.job_id} has ended, its timers stay: {left}")

    def _law2(self, found: dict[str, Any]) -> None:
        cause = found["cause"]
        if found["outcome"] == "rejected":
            self.refused[found["reason"]] = self.refused.get(found["reason"], 0) + 1
            if found["facts"]:
                raise Violation("law2", f"seq {self.head.seq} is rejected and has facts")
        topic = cause.get("topic")
        if topic is None:
            return
        expected, offset = self._answered.get(topic, 0), cause["offset"]
        if offset != expected or offset >= self._inputs[topic].end:
            raise Violation(
                "law2", f"seq {self.head.seq} answers {topic}/{offset}; {expected} is the next to answer"
            )
        self._answered[topic] = offset + 1

    def answered(self, topic: str) -> int:
        """So many inputs of the topic have their record."""
        return self._answered.get(topic, 0)

    # ------------------------------------------------------------------------------- before each fact

    def _submission(self, fact: external_events.JobSubmitted) -> None:
        if fact.job_id in self._submissions:
            raise Violation("outcome", f"{fact.job_id} is submitted twice")
        self._submissions[fact.job_id] = None

    def _estimate(self, fact: external_events.JobEstimated) -> None:
        if fact.job_id in self._estimates:
            raise Violation("estimate", f"{fact.job_id} is estimated twice")
        self._estimates[fact.job_id] = None

    def _placement(self, fact: ledger_events.PlacementDecided) -> None:
        at = f"seq {self.head.seq}: {fact.job_id}"
        job = self.state.jobs.get(fact.job_id)
        if job is None or job.status is not JobStatus.QUEUED:
            raise Violation("placement", f"{at} is not waiting")
        if self.state.frozen:
            raise Violation("freeze", f"{at} is placed while the cell is frozen")
        if fact.attempt != job.attempt + 1 or len(fact.tasks) != job.demand.tasks:
            raise Violation("placement", f"{at}: attempt {fact.attempt} with {len(fact.tasks)} tasks")
        for place in fact.tasks:
            node = self.state.nodes[place.node_id]
            faulted = [gpu for gpu in place.gpus if node.faulted_gpu_mask >> gpu & 1]
            if node.status is not NodeStatus.READY or faulted:
                raise Violation("placement", f"{at}: {node.spec.node_id} is {node.status}, faulted {faulted}")
            self.placed[self.head.seq, place.task_id] = self._order(job, fact, place)
        for machine in self.machines.values():
            for process in machine.processes.values():
                if process.order.job_id == fact.job_id and process.key not in self._disowned:
                    raise Violation("proof", f"{at} is placed anew, {process.key} lives")

    def _order(self, job: JobState, fact: ledger_events.PlacementDecided, place: TaskPlacement) -> StartTask:
        """What the placer is to order, as far as a node looks at it."""
        node = self.state.nodes[place.node_id]
        return StartTask(
            token=self.head.seq,
            node_id=place.node_id,
            task_id=place.task_id,
            job_id=job.job_id,
            attempt=fact.attempt,
            boot_id=node.spec.boot_id,
            incarnation=node.incarnation,
            command=job.spec.command,
            place=place,
            peers=(),
            rendezvous_port=29_500,
            grace_ms=job.spec.grace_ms,
        )

    def _start(self, fact: external_events.TaskStarted) -> None:
        key = (fact.task_id, fact.token)
        if key in self._told_started:
            raise Violation("attempt", f"seq {self.head.seq}: {key} is told to start a second time")
        self._told_started[key] = None

    def _stop(self, fact: ledger_events.StopDecided) -> None:
        job = self.state.jobs[fact.job_id]
        if job.status is JobStatus.STOPPING and job.stop_reason in FINAL_STOPS:
            raise Violation(
                "outcome", f"seq {self.head.seq}: {job.job_id} is ending, {job.stop_reason}; {fact.reason}"
            )
        for task_id in self.state.jobs[fact.job_id].tasks:
            self._stops[self.head.seq, task_id] = None

    def _join(self, fact: external_events.NodeJoined) -> None:
        for task in fact.tasks:
            self._stops[self.head.seq, task.task_id] = None
        self._left.pop(fact.node.node_id, None)
        if self._slandered.pop(fact.node.node_id, "") is None:  # what it has accepted may still start
            self._disowned |= {(task.task_id, task.token): None for task in fact.tasks}

    def _departure(self, fact: external_events.NodeLeft) -> None:
        self._left[fact.node_id] = (self.state.now_ms, fact.proof)
        machine = self.machines[fact.node_id]
        if machine.up and machine.spec.boot_id == fact.boot_id and fact.proof == "fenced":
            self._slandered[fact.node_id] = None

    def _freed(
        self, fact: external_events.TaskExited | ledger_events.TaskLost | external_events.OrderRefused
    ) -> None:
        """A task is said to be dead, or never to live: it must be."""
        process = next(
            (
                process
                for process in self.machines[fact.node_id].processes.values()
                if process.order.task_id == fact.task_id
            ),
            None,
        )
        if process is not None and fact.node_id in self._slandered:
            self._disowned[process.key] = None
        elif process is not None:
            raise Violation("proof", f"seq {self.head.seq}: {fact.TYPE} of {process.key}, which lives")

    def _lost(self, fact: ledger_events.TaskLost) -> None:
        self._freed(fact)
        cause = self._cause
        assert cause is not None
        certain = cause.TYPE == external_events.NodeJoined.TYPE or getattr(cause, "proof", "") == "fenced"
        if self.state.frozen and not certain:
            raise Violation("freeze", f"seq {self.head.seq}: {fact.task_id} is given up in a frozen cell")

    def _node_lost(self, fact: ledger_events.NodeLost) -> None:
        """Departures without force or farewell: never of most nodes at once."""
        cause = self._cause
        if self.state.frozen and getattr(cause, "proof", "") != "fenced":
            raise Violation("freeze", f"seq {self.head.seq}: {fact.node_id} is given up in a frozen cell")
        if getattr(cause, "proof", "shutdown") in ("fenced", "shutdown"):  # or not told by a departure
            return
        settings = self.state.settings
        since_ms = self.state.now_ms - settings.freeze_window_ms
        missing = [node_id for node_id, (at_ms, _) in self._left.items() if at_ms >= since_ms]
        there = [node_id for node_id in self.state.nodes if node_id not in self._left]
        of = len(missing) + len(there)
        if of > 1 and len(missing) > settings.freeze_fraction * of:
            raise Violation("freeze", f"seq {self.head.seq}: {len(missing)} of {of} nodes are given up")

    def _frozen(self, fact: ledger_events.CellFrozen) -> None:
        self.froze += 1

    def _ended(self, fact: ledger_events.JobEnded) -> None:
        at = f"seq {self.head.seq}: {fact.job_id} ended {fact.outcome}"
        if fact.job_id in self.ended:
            raise Violation("outcome", f"{at} after {self.ended[fact.job_id]}")
        self.ended[fact.job_id] = fact.outcome
        job = self.state.jobs[fact.job_id]
        program = self.programs[fact.job_id]
        alive = [t.place.task_id for t in job.tasks.values() if t.status is not TaskStatus.EXITED]
        if alive:
            raise Violation("outcome", f"{at}, but {alive} have not")
        self._right(at, fact.outcome, job, program)

    def _right(self, at: str, outcome: str, job: JobState, program: Program) -> None:
        """Whether this job may end so."""
        allowed = program.job.allowed
        if job.job_id in self.cancelled:
            allowed = (*allowed, CANCELLED)
        worn_out = outcome == FAILED and job.losses >= MAX_LOSSES
        if outcome == UNSCHEDULABLE:
            if self._could_fit(job):
                raise Violation("outcome", f"{at}, but it fits the empty cell")
        elif outcome not in allowed and not worn_out:
            raise Violation("outcome", f"{at}; right is one of {allowed}")
        if outcome == SUCCEEDED and len(program.good.get(job.token, {})) != job.spec.workers:
            raise Violation("outcome", f"{at}, but of its workers only {program.good} came to a good end")
        if outcome == FAILED and not worn_out and len(program.own_failures) < job.spec.retry.max_attempts:
            raise Violation("outcome", f"{at} after {len(program.own_failures)} failures of its own")

    def _could_fit(self, job: JobState) -> bool:
        """A sufficient test of its own: whether the gang fits nodes that are not gone, if they were empty."""
        demand = job.demand
        left = []
        for node in self.state.nodes.values():
            if node.status is not NodeStatus.GONE:
                spec = node.spec
                left.append([len(spec.gpus), spec.cores, spec.host_memory_mib, spec.bandwidth_mbps, node])
        for need in demand.needs():
            for room in left:
                if _takes(room, need, demand.gpu_models):
                    break
            else:
                return False
        return True

    # ----------------------------------------------------------------------------- what machines do

    def order_read(self, machine: Machine, order: Order) -> None:
        """A node obeys nothing but what a valid record decided (LAW 4)."""
        key = (order.token, order.task_id)
        if isinstance(order, StartTask):
            own = self.placed.get(key)
            self.read[key] = None
            if own is None or _told(own.place) != _told(order.place) or own.node_id != machine.node_id:
                raise Violation(
                    "order", f"{machine.node_id} reads a start of {key} that no valid record decided"
                )
        elif key not in self._stops:
            raise Violation("order", f"{machine.node_id} reads a stop of {key} that no valid record decided")

    def signalled(self, machine: Machine, task_id: str) -> None:
        """A signal goes only to what was ordered to stop."""
        if task_id not in machine.stops_read:
            raise Violation("signal", f"{machine.node_id} signals {task_id}, which nobody stopped")

    def starts(self, machine: Machine, order: StartTask) -> None:
        """A program is about to start."""
        key = (order.task_id, order.token)
        at = f"{machine.node_id} starts {order.task_id}@{order.token}"
        self.world.tell(at)
        job = self.state.jobs.get(order.job_id)
        task = job.tasks.get(order.task_id) if job is not None else None
        unknown = job is None or task is None or job.token != order.token or task.status is TaskStatus.EXITED
        if unknown and (machine.node_id in self._slandered or key in self._disowned):
            self._disowned[key] = None
        elif unknown:
            raise Violation("order", f"{at}, which the ledger does not know as living")
        if key in self._started or order.boot_id != machine.spec.boot_id:
            raise Violation("attempt", f"{at} twice, or for the boot {order.boot_id}")
        self._started[key] = None
        for other in self.machines.values():
            for process in other.processes.values():
                rival = process.order.job_id == order.job_id and process.order.token != order.token
                if rival and process.key not in self._disowned and key not in self._disowned:
                    raise Violation("attempt", f"{at} while {process.key} lives on {other.node_id}")
        place = order.place
        for gpu in place.gpus:
            beside = [p.order.place for p in machine.processes.values() if gpu in p.order.place.gpus]
            if sum(p.gpu_share_milli for p in beside) + place.gpu_share_milli > WHOLE_GPU:
                raise Violation("gpu", f"{at} on GPU {gpu} beside {[p.task_id for p in beside]}")
            last = self._gpu_tokens.get((machine.node_id, gpu), 0)
            if place.gpu_share_milli == WHOLE_GPU and order.token < last:
                raise Violation("token", f"{at} on GPU {gpu} after token {last}")
            self._gpu_tokens[machine.node_id, gpu] = max(last, order.token)


def _told(place: TaskPlacement) -> tuple[object, ...]:
    """What a place says, whatever it was decoded into."""
    return place.task_id, place.rank, place.node_id, place.gpus, place.cores, place.gpu_share_milli


def _takes(room: list[Any], need: ResourceVector, gpu_models: tuple[str, ...]) -> bool:
    """Takes the need off a node's room [GPUs, cores, MiB, Mbit/s, node] if it fits; shares count as whole GPUs."""
    node: NodeState = room[4]
    model = node.spec.gpus[0].model if node.spec.gpus else ""
    if need.gpus and ((gpu_models and model not in gpu_models) or node.gpu_memory_mib < need.gpu_memory_mib):
        return False
    asked = (need.gpus, need.cores, need.host_memory_mib, need.bandwidth_mbps)
    if any(has < wanted for has, wanted in zip(room, asked, strict=False)):
        return False
    for at, wanted in enumerate(asked):
        room[at] -= wanted
    return True


def landed(judge: Judge, record: Record, partition: Partition) -> None:
    """A submission is in the log: from now on it may not be lost."""
    if record.id.startswith("submit-"):
        judge.submitted[record.id.removeprefix("submit-")] = None


BEFORE: Mapping[str, Callable[[Judge, Any], None]] = MappingProxyType(
    {
        external_events.JobSubmitted.TYPE: Judge._submission,
        external_events.JobEstimated.TYPE: Judge._estimate,
        ledger_events.PlacementDecided.TYPE: Judge._placement,
        external_events.TaskStarted.TYPE: Judge._start,
        ledger_events.StopDecided.TYPE: Judge._stop,
        external_events.NodeJoined.TYPE: Judge._join,
        external_events.NodeLeft.TYPE: Judge._departure,
        external_events.TaskExited.TYPE: Judge._freed,
        external_events.OrderRefused.TYPE: Judge._freed,
        ledger_events.TaskLost.TYPE: Judge._lost,
        ledger_events.NodeLost.TYPE: Judge._node_lost,
        ledger_events.CellFrozen.TYPE: Judge._frozen,
        ledger_events.JobEnded.TYPE: Judge._ended,
    }
)

TOLD: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        ledger_events.PlacementDecided.TYPE: lambda fact: (
            "places " + ", ".join(f"{t.task_id} on {t.node_id}{list(t.gpus)}" for t in fact.tasks)
        ),
        ledger_events.StopDecided.TYPE: lambda fact: f"stops {fact.job_id}.{fact.attempt}: {fact.reason}",
        external_events.TaskStarted.TYPE: lambda fact: f"{fact.task_id}@{fact.token} runs on {fact.node_id}",
        external_events.TaskExited.TYPE: lambda fact: (
            f"{fact.task_id}@{fact.token} {fact.cause} on {fact.node_id}"
        ),
        external_events.OrderRefused.TYPE: lambda fact: f"{fact.task_id}@{fact.token} refused: {fact.reason}",
        ledger_events.TaskLost.TYPE: lambda fact: f"{fact.task_id} is given up: {fact.reason}",
        ledger_events.JobRequeued.TYPE: lambda fact: f"{fact.job_id} queues again: {fact.reason}",
        ledger_events.JobEnded.TYPE: lambda fact: f"{fact.job_id} ended {fact.outcome}",
        external_events.NodeLeft.TYPE: lambda fact: f"{fact.node_id} left: {fact.proof}",
        external_events.NodeJoined.TYPE: lambda fact: f"{fact.node.node_id} joined as {fact.node.boot_id}",
        external_events.NodeSuspected.TYPE: lambda fact: f"{fact.node_id} is suspect: {fact.reason}",
        ledger_events.CellFrozen.TYPE: lambda fact: f"the cell freezes: {fact.reason}",
        ledger_events.CellThawed.TYPE: lambda fact: f"the cell thaws: {fact.reason}",
    }
)
