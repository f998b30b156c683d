"""What must hold of any cell, whatever its policy: judged by facts alone, with a book of the judge's own.

Rules: `waits` (nobody waits in an idle cell that has room, and who is told that it can never run cannot),
`losses` (an attempt is lost so often and no more), `temporary` (what a service takes ends, what a person says
stays), `counted` (services slow a job so often and no more), `gpus` (an order names GPUs that are there,
sound and nobody else's), `probe` (no node is proven dead before its lease is over, none that keeps no
leases), `alarm` (a stall is reported, and nothing else is).
"""

from itertools import product
from typing import Any

from penstock.ledger.check.check import check
from penstock.ledger.fold.evolve import begin, evolve
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.node.node_state import NodeState
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import (
    ADJUSTED_FOR_MS,
    MAX_THROTTLES,
    BandwidthDecided,
    CoresDecided,
)
from penstock.model.decisions.ledger_events import (
    JobRequeued,
    NodeProbed,
    PlacementDecided,
    ProbeExpired,
    TaskLost,
)
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobSubmitted,
    NodeJoined,
    OrderRefused,
    ProbeSent,
    TaskExited,
)
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus, NodeStatus
from penstock.model.nouns.types import WHOLE_GPU, Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock.scheduling.liveness import stalled
from penstock_services.placer.core.orders import start_orders

MAX_LOSSES = 10  # as `penstock_services/placer/README.md` promises
PASS = "cell:place_more"
"""The timer of a pass over the waiting jobs."""
LATE_MS = 2 * ADJUSTED_FOR_MS
"""What cannot be given back is tried again after as long a time once more."""


class Broken(AssertionError):
    """A rule is violated; the message begins with its name."""


def room(nodes: list[NodeState], job: JobState, *, now: bool) -> bool:
    """Whether the gang fits on these nodes: on what is free now, or on all that they have."""
    demand = job.demand
    if demand.parameter_servers:
        return _both(nodes, job, now=now)
    return sum(_tasks(node, demand.worker, job, now=now) for node in nodes) >= demand.workers


def _tasks(node: NodeState, need: ResourceVector, job: JobState, *, now: bool) -> int:
    """How many such tasks the node holds."""
    most = job.demand.tasks
    spec = node.spec
    if need.gpus:
        sound = _sound(node) if now else list(spec.gpus)
        if not sound or (job.spec.gpu_models and {gpu.model for gpu in sound} - set(job.spec.gpu_models)):
            return 0
        if min(gpu.memory_mib for gpu in spec.gpus) < need.gpu_memory_mib:
            return 0
        each = WHOLE_GPU // need.gpu_share_milli if spec.shares_gpus else 1
        if need.gpu_memory_mib and need.gpu_share_milli < WHOLE_GPU:
            each = min(each, min(gpu.memory_mib for gpu in spec.gpus) // need.gpu_memory_mib)
        most = min(most, len(sound) * each if need.gpu_share_milli < WHOLE_GPU else len(sound) // need.gpus)
    cores = node.free_core_mask.bit_count() if now else spec.cores
    memory = node.free_host_memory_mib if now else spec.host_memory_mib
    if need.cores:
        most = min(most, cores // need.cores)
    if need.host_memory_mib:
        most = min(most, memory // need.host_memory_mib)
    return max(0, most)


def _sound(node: NodeState) -> list[Any]:
    """GPUs of the inventory that may be used, of a node without tasks."""
    faulted = {
        node.gpu_uuids[slot] for slot in range(len(node.gpu_uuids)) if node.unusable_gpu_mask >> slot & 1
    }
    return [gpu for gpu in node.spec.gpus if gpu.uuid not in faulted]


def _both(nodes: list[NodeState], job: JobState, *, now: bool) -> bool:
    """Workers and parameter servers, which have no GPUs."""
    demand = job.demand
    worker, server = demand.worker, demand.parameter_server
    ranges = [range(_tasks(node, worker, job, now=now) + 1) for node in nodes]
    for counts in product(*ranges):
        if sum(counts) < demand.workers:
            continue
        servers = 0
        for node, count in zip(nodes, counts, strict=True):
            cores = (node.free_core_mask.bit_count() if now else node.spec.cores) - count * worker.cores
            memory = node.free_host_memory_mib if now else node.spec.host_memory_mib
            memory -= count * worker.host_memory_mib
            fits = demand.parameter_servers
            if server.cores:
                fits = min(fits, cores // server.cores)
            if server.host_memory_mib:
                fits = min(fits, memory // server.host_memory_mib)
            servers += max(0, fits)
        if servers >= demand.parameter_servers:
            return True
    return False


class CellRules:
    """Judges one cell, record by record, and at moments at which no timer is due."""

    def __init__(self) -> None:
        self.losses: dict[str, int] = {}
        self.throttles: dict[str, int] = {}
        self.adjusted: dict[tuple[str, str], tuple[str, int, Any]] = {}
        """(task, cores or bandwidth) → (who has set them, when, cause or percent) of the latest decision."""
        self.calm_since_ms: dict[str, int] = {}
        """Node → since when it is Ready."""
        self.present: dict[str, set[str]] = {}
        self.leases: dict[str, bool] = {}
        self.faulted: dict[str, set[str]] = {}
        self.held: dict[str, dict[str, int]] = {}
        """UUID → task → thousandths."""
        self.sent_ms: dict[str, int] = {}
        self.alarms = 0

    # ------------------------------------------------------------------------------- every record

    def record(self, state: CellState, event: Event, facts: list[Event]) -> None:
        """The facts of one record, after they were folded. Raises `Broken`."""
        for fact in facts:
            match fact:
                case JobRequeued(reason="node_lost" | "refused"):
                    self._lost(fact.job_id)
                case CoresDecided() | BandwidthDecided():
                    self._adjusted(state, event, fact)
                case NodeJoined():
                    self._joined(fact)
                case GpuFaulted(uuid=str(uuid)):
                    self.faulted[fact.node_id].add(uuid)
                case TaskExited() | TaskLost() | OrderRefused():
                    for tasks in self.held.values():
                        tasks.pop(fact.task_id, None)
                case PlacementDecided():
                    self._placed(state, fact)
                case NodeProbed() if not self.leases[fact.node_id]:
                    raise Broken(f"probe: {fact.node_id} keeps no leases")
                case ProbeSent():
                    self.sent_ms[fact.node_id] = state.now_ms
                case ProbeExpired():
                    silent_ms = state.now_ms - self.sent_ms[fact.node_id]
                    if silent_ms < state.settings.lease_ms:
                        raise Broken(f"probe: {fact.node_id} is given up after {silent_ms} ms")
        if PASS in state.timers and (found := stalled(state)) is not None:
            raise Broken(f"alarm: a pass is under way, and {found}")
        for node_id, node in state.nodes.items():
            if node.status is not NodeStatus.READY:
                self.calm_since_ms.pop(node_id, None)
            else:
                self.calm_since_ms.setdefault(node_id, state.now_ms)

    def _lost(self, job_id: str) -> None:
        self.losses[job_id] = self.losses.get(job_id, 0) + 1
        if self.losses[job_id] > MAX_LOSSES:
            raise Broken(f"losses: {job_id} was lost {self.losses[job_id]} times")

    def _adjusted(self, state: CellState, event: Event, fact: Any) -> None:
        cores = isinstance(fact, CoresDecided)
        key = fact.task_id, "cores" if cores else "bandwidth"
        by_person = fact.cause == "" and event.TYPE != "penstock.timer.fired"
        known = self.adjusted.get(key)
        if known is not None and known[0] == "person" and event.TYPE == "penstock.timer.fired":
            raise Broken(f"temporary: what a person has set of {fact.task_id} ends by itself")
        now = len(fact.cores) if cores else fact.memory_bandwidth_percent
        before = known[2] if known is not None else None
        slower = (before is None or now < before) if cores else (now is not None and now != before)
        if fact.cause == "contention" and slower:
            self.throttles[fact.job_id] = self.throttles.get(fact.job_id, 0) + 1
            job = state.jobs.get(fact.job_id)
            if job is not None and self.throttles[fact.job_id] > MAX_THROTTLES * job.spec.workers:
                raise Broken(f"counted: {fact.job_id} was slowed {self.throttles[fact.job_id]} times")
        lasting = fact.cause in ("settled", "released") or (not cores and now is None)
        who = "person" if by_person else "" if lasting else "service"
        self.adjusted[key] = who, state.now_ms, now

    def _joined(self, fact: NodeJoined) -> None:
        node = fact.node
        self.present[node.node_id] = {gpu.uuid for gpu in node.gpus}
        self.faulted[node.node_id] = {fault.uuid for fault in fact.faults}
        self.leases[node.node_id] = fact.leases

    def _placed(self, state: CellState, fact: PlacementDecided) -> None:
        job = state.jobs[fact.job_id]
        for order in start_orders(state, fact.job_id, job.token):
            if not isinstance(order, StartTask):
                continue
            if order.lease_ms and not self.leases[order.node_id]:
                raise Broken(f"probe: {order.task_id} has a lease that its node does not keep")
            for uuid in order.gpu_uuids:
                if uuid not in self.present[order.node_id] or uuid in self.faulted[order.node_id]:
                    raise Broken(
                        f"gpus: {order.task_id} is ordered on {uuid}, which is not there or not sound"
                    )
                holders = self.held.setdefault(uuid, {})
                holders[order.task_id] = order.place.gpu_share_milli
                alone = not fact.after and fact.group is None
                if alone and sum(holders.values()) > WHOLE_GPU:
                    raise Broken(f"gpus: {uuid} is held by {holders}")

    # ------------------------------------------------------------------------ where no timer is due

    def look(self, state: CellState, now_ms: int) -> None:
        """At this time, at which all due timers have fired. Raises `Broken`."""
        if problems := check(state):
            raise Broken(f"check: {problems[0]}")
        found = stalled(state)
        if found is not None:
            raise Broken(f"alarm: {found}")
        self._nobody_waits(state)
        self._reserved(state)
        self._temporary(state, now_ms)

    def _nobody_waits(self, state: CellState) -> None:
        """In a cell without running jobs whoever fits starts; who can never run is told, and nobody else."""
        there = [node for node in state.nodes.values() if node.status is not NodeStatus.GONE]
        for job_id in state.unschedulable:
            if there and room(there, state.jobs[job_id], now=False):
                raise Broken(f"waits: {job_id} is told that it never fits, and does")
            if f"{job_id}:unschedulable" not in state.timers:
                raise Broken(f"waits: {job_id} can never run, and its wait has no end")
        if state.holding or state.frozen or state.in_window or not state.queue:
            return
        if state.failed_choices.in_a_row and PASS in state.timers:
            return  # the choice is tried again
        kept = {n for unit in state.planned.values() if unit.proposed is not None for n in unit.nodes}
        usable = [node for node in there if node.placeable and node.spec.node_id not in kept]
        for job_id in list(state.queue.values())[:20]:
            if room(usable, state.jobs[job_id], now=True):
                raise Broken(f"waits: {job_id} fits the idle cell, reserved are {list(state.planned)}")

    def _reserved(self, state: CellState) -> None:
        """Nodes are kept for a job only where something is awaited: a task's end, or a stop's."""
        if state.stopping or state.in_window or state.frozen or PASS in state.timers:
            return
        for unit in state.planned.values():
            nodes = [state.nodes.get(node_id) for node_id in unit.nodes]
            if unit.proposed is None and not any(node is not None and node.tasks for node in nodes):
                raise Broken(f"waits: {unit.nodes} are kept for {unit.job_id}, and nothing is awaited there")

    def _temporary(self, state: CellState, now_ms: int) -> None:
        for (task_id, what), (who, at_ms, _) in list(self.adjusted.items()):
            job = state.jobs.get(task_id.split(".")[0])
            task = None if job is None else job.tasks.get(task_id)
            if job is None or task is None:
                del self.adjusted[task_id, what]
                continue
            node_id = task.place.node_id
            calm_ms = max(at_ms, self.calm_since_ms.get(node_id, now_ms))
            if who != "service" or job.status is not JobStatus.RUNNING or job.succession.followed:
                continue
            if now_ms - calm_ms <= LATE_MS:
                continue
            node = state.nodes[node_id]
            lacks = max(task.cores.placed, task.cores.throttled_from) - len(task.used_cores)
            tried_again = f"{job.job_id}:adjustment" in state.timers  # as far as cores are free then
            fits = lacks < 0 or 0 < lacks <= node.free_core_mask.bit_count()
            if what == "bandwidth" or (fits and not tried_again):
                raise Broken(f"temporary: {task_id} is adjusted for {now_ms - at_ms} ms ({what})")
        for timer in state.timers.values():
            if timer.about.kind == "adjustment":
                job = state.jobs.get(timer.about.id)
                if job is None or job.status not in (JobStatus.RUNNING, JobStatus.STOPPING):
                    raise Broken(f"temporary: a timer of {timer.about.id} outlives the attempt")

    def alarm(self, state: CellState, now_ms: int) -> None:
        """A placer that sleeps, in an idle cell with room for a small job: the alarm rings."""
        if PASS in state.timers:
            return  # it is about to wake
        sleeping = load(dump(state))
        begin(sleeping, state.seq + 1, now_ms, state.term)
        spec = JobSpec(command=("train",), owner="nobody")
        need = ResourceVector(cores=1, host_memory_mib=1)
        found = Estimate(worker=need, confidence=1.0, tier="user", source="a test")
        evolve(sleeping, JobSubmitted(job_id="small", spec=spec))
        evolve(sleeping, JobEstimated(job_id="small", estimate=found))
        usable = [node for node in sleeping.nodes.values() if node.placeable]
        if room(usable, sleeping.jobs["small"], now=True):
            self.alarms += 1
            if stalled(sleeping) is None:
                raise Broken("alarm: nobody is told that the placer sleeps")

    def end(self, state: CellState) -> None:
        """Nothing can happen any more."""
        if state.jobs:
            raise Broken(f"waits: {list(state.jobs)[:3]} are left for ever")
