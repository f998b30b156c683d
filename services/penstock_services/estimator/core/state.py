"""The estimator's state: a fold of the cell's ledger, as far as estimates need it."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.ledger.record import GENESIS, read_valid
from penstock.ledger.replica import Replica
from penstock.model import external_events, ledger_events
from penstock.model.event import wire_type
from penstock.model.transitions import NodeStatus
from penstock.model.types import JobSpec
from penstock_services.estimator.core.eta.remaining import Bounds
from penstock_services.estimator.core.progress import (
    NO_GOAL,
    Goal,
    Progress,
    Telling,
    Told,
    begun,
    goal_of,
    measured_steps,
    steps_of,
)
from penstock_services.estimator.core.recall import MAX_RECALLED, Recall
from penstock_services.estimator.core.resources.core_tier import PastCores
from penstock_services.estimator.core.resources.history import UNKNOWN, History, Run, bounded
from penstock_services.estimator.core.resources.memory_kills import REASON, Killed
from penstock_services.estimator.core.resources.nearest import Nearest
from penstock_services.estimator.core.resources.node_sizes import NodeSizes
from penstock_services.estimator.core.resources.rooms import Rooms
from penstock_services.estimator.core.runs import (
    About,
    Cards,
    FinishedRun,
    Given,
    Said,
    about,
    card_of,
    doubt,
    given,
    said,
)
from penstock_services.estimator.core.stages.registry import Owned, StageLog

MAX_EARLY = 10_000  # estimates that the ledger holds before their job, as the placer keeps them
MAX_FORGOTTEN = (
    1_000_000  # ids of those that it had to let go; about 100 MB, and a placer that is as far behind
)


class At(NamedTuple):
    """Where in the ledger a fact stands."""

    seq: int
    now_ms: int
    event_id: str | None = None
    """Of the input that the record answers."""


@dataclass(slots=True)
class LiveJob:
    """A job that the ledger says was submitted and has not ended."""

    about: About
    spec: JobSpec | None
    """None once it is estimated."""
    event_id: str
    """Of its submission."""
    said: Said | None = None
    workers: dict[str, None] = field(default_factory=dict)
    """Worker tasks of the latest attempt; a new placement replaces them, what they got, and the exits."""
    given: Given | None = None
    exits: list[Run] = field(default_factory=list)
    partly: bool = False
    """Some of its workers had exited before this fold began: it teaches nothing."""
    goal: Goal = NO_GOAL
    progress: Progress | None = None
    """Of the latest attempt; None: it was never placed."""


class Ledger:
    """Folds records in the order of their partition. `fold` is the only writer."""

    def __init__(
        self,
        jobs_topic: str,
        jobs_partition: int,
        finished: Callable[[FinishedRun], None] | None = None,
        staged: Callable[[int, Owned], None] | None = None,
    ) -> None:
        """`finished` gets every succeeded run, sound or not, and every worker that was killed for its memory; `staged`
        each row of the stages that became another, with the seq of the record that did it.
        """
        self.history = History()
        self.nearest = Nearest()
        self.past_cores = PastCores()
        self.killed = Killed()
        self.stages = StageLog()
        self.rooms = Rooms()
        self.learning = True
        """Whether ended runs teach; not while records are folded whose runs are known already."""
        self.set_aside = 0
        """Runs whose measurements cannot be true."""
        self.reasons: Counter[str] = Counter()
        """Why runs taught nothing, without numbers → how many."""
        self._finished = finished
        self._staged = staged
        self.cards = Cards()
        """Node → its GPUs; the same object for good."""
        self.node_sizes = NodeSizes()
        self.stepped: dict[str, str] = {}
        """Live job → id of the event by which it last told its steps; whoever answers that takes it out."""
        self.live: dict[str, LiveJob] = {}
        self.jobs_offset = 0
        """Offset after the last record of the jobs partition that the placer answered."""
        self.void = 0
        """Records that broke the chain and were skipped (LAW 3)."""
        self._head = GENESIS
        self._jobs = (jobs_topic, jobs_partition)
        self._early: OrderedDict[str, Said] = OrderedDict()
        self._forgotten: OrderedDict[str, None] = OrderedDict()
        self._again: list[str] = []
        self._job_of_task: dict[str, str] = {}
        self._recalls_from: int | None = None

    def begin_at(self, replica: Replica) -> None:
        """Goes on from a fold of the cell that somebody else has made (a snapshot); only before the first `fold`.

        Gangs of which some workers had exited teach nothing: a snapshot does not say what those used.
        """
        state, self._head = replica.state, replica.head
        self.jobs_offset = state.positions.get(self._jobs, 0)
        for node_id, node in state.nodes.items():
            card = self.cards[node_id] = card_of(node.spec)
            if node.status is not NodeStatus.GONE:
                self.rooms.put(node.spec)
                self.node_sizes.put(node_id, card.model, len(node.spec.gpus))
        self._early = OrderedDict((job_id, said(found)) for job_id, found in state.early_estimates.items())
        for job in state.jobs.values():
            estimate = job.estimate
            live = LiveJob(
                about(job.spec),
                job.spec if estimate is None else None,
                job.job_id,
                None if estimate is None else said(estimate),
                goal=goal_of(job.spec),
            )
            workers = {t: task for t, task in job.tasks.items() if task.place.role == "worker"}
            if workers:
                live.given = given([task.place for task in workers.values()], self.cards)
                live.workers = dict.fromkeys(workers)
                live.progress = begun(
                    job.attempt,
                    job.placed_ms or 0,
                    [task.place for task in workers.values()],
                    live.given.card.model,
                )
                live.progress.started_ms = job.running_ms
                self._recalls_from = min(self._recalls_from or job.token, job.token)
                live.partly = any(task.exited_ms is not None for task in workers.values())
                self._job_of_task.update(dict.fromkeys(workers, job.job_id))
            self.live[job.job_id] = live

    def recalls_from(self, offset: int) -> int:
        """From which offset on records before the snapshot, which ends at `offset`, say how far running jobs are."""
        if self._recalls_from is None:
            return offset
        oldest = self._recalls_from - 1  # a record's offset is at least its seq - 1: void ones lie between
        return min(max(oldest, offset - MAX_RECALLED, 0), offset)

    def recall(self, records: Recall) -> None:
        """Folds what they say of the jobs that run in the snapshot; only between `begin_at` and the first `fold`."""
        for found in records.until(self._head.id):
            at = At(found.seq, found.now_ms, found.event_id)
            for fact in found.facts:
                HANDLERS[fact.type](self, at, fact.event())

    @property
    def seq(self) -> int:
        """Of the last valid record."""
        return self._head.seq

    def fold(self, value: bytes) -> None:
        """One record of the ledger's partition."""
        found = read_valid(self._head, value)
        if found is None:
            self.void += 1
            return
        self._head, record = found
        cause = record.cause
        if cause.topic is not None and (cause.topic, cause.partition) == self._jobs:
            self.jobs_offset = max(self.jobs_offset, cause.offset + 1)
        at = At(record.seq, record.now_ms, cause.event_id)
        for fact in record.facts:
            handler = HANDLERS.get(fact.type)
            if handler is not None:
                handler(self, at, fact.event())

    def unestimated(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """(job id, job, spec) of jobs without an estimate in the ledger, oldest first."""
        return [(job_id, job, job.spec) for job_id, job in self.live.items() if job.spec is not None]

    def forgotten(self) -> list[tuple[str, LiveJob, JobSpec]]:
        """As `unestimated`, of those jobs whose estimate came so early that the placer had to forget it; once each."""
        again, self._again = self._again, []
        found = [(job_id, self.live[job_id]) for job_id in again if job_id in self.live]
        return [(job_id, job, job.spec) for job_id, job in found if job.spec is not None]

    def _submitted(self, at: At, fact: external_events.JobSubmitted) -> None:
        said_early = self._early.pop(fact.job_id, None)
        spec = None if said_early is not None else fact.spec
        if self._forgotten.pop(fact.job_id, "") is None:
            self._again.append(fact.job_id)
        event_id = at.event_id or fact.job_id
        self.live[fact.job_id] = LiveJob(
            about(fact.spec), spec, event_id, said_early, goal=goal_of(fact.spec)
        )

    def _estimated(self, at: At, fact: external_events.JobEstimated) -> None:
        job = self.live.get(fact.job_id)
        if job is not None:
            job.spec = None
            job.said = said(fact.estimate)
            return
        self._early[fact.job_id] = said(fact.estimate)
        if len(self._early) > MAX_EARLY:
            self._forgotten[self._early.popitem(last=False)[0]] = None
            if len(self._forgotten) > MAX_FORGOTTEN:
                self._forgotten.popitem(last=False)

    def _placed(self, at: At, fact: ledger_events.PlacementDecided) -> None:
        job = self.live.get(fact.job_id)
        if job is None:
            return
        self._forget_attempt(job)
        workers = [place for place in fact.tasks if place.role == "worker"]
        job.given = given(workers, self.cards)
        job.workers = dict.fromkeys(place.task_id for place in workers)
        job.progress = begun(fact.attempt, at.now_ms, workers, job.given.card.model, job.progress)
        for task_id in job.workers:
            self._job_of_task[task_id] = fact.job_id

    def _exited(self, at: At, fact: external_events.TaskExited) -> None:
        job = self.live.get(self._job_of_task.get(fact.task_id, ""))
        if job is None or job.given is None:
            return
        if fact.cause == "out_of_memory":
            self._killed(at, fact.task_id, job, job.given)
        if fact.cause != "exited" or fact.exit_code != 0:
            return
        if job.progress is not None:
            job.progress.exit(fact.task_id, fact.exited_ms)
        used, run_ms = fact.usage, fact.exited_ms - fact.started_ms
        cpu_ms = bounded(used.cpu_ms)
        job.exits.append(
            Run(
                ended_ms=at.now_ms,
                seq=at.seq,
                run_ms=run_ms if run_ms >= 0 else UNKNOWN,
                gpus=job.given.gpus,
                busy_cores=cpu_ms / run_ms if run_ms > 0 else UNKNOWN,
                host_memory_mib=bounded(used.host_memory_mib),
                gpu_memory_mib=bounded(used.gpu_memory_mib),
                gpu_utilisation_percent=bounded(used.gpu_utilisation_percent),
                gpu_utilisation_std=bounded(used.gpu_utilisation_std),
            )
        )

    def _ended(self, at: At, fact: ledger_events.JobEnded) -> None:
        job = self.live.pop(fact.job_id, None)
        if job is None:
            return
        teaches = fact.outcome == "succeeded" and self.learning and not job.partly
        if teaches and job.exits and job.given is not None:
            self._learn(at, fact.job_id, job, job.given)
        self._forget_attempt(job)
        self.stepped.pop(fact.job_id, None)

    def _killed(self, at: At, task_id: str, job: LiveJob, given: Given) -> None:
        """A worker took more host memory than it was promised: that promise is what it teaches, nothing else of it."""
        if not self.learning:
            return
        held_mib = 0 if job.said is None else job.said.host_memory_mib
        self.killed.add(job.about, held_mib)
        self.reasons[REASON] += 1
        if self._finished is not None:
            why = f"{REASON}: killed with {held_mib} MiB of host memory"
            measured = Run(ended_ms=at.now_ms, seq=at.seq)
            job_id = self._job_of_task[task_id]
            self._finished(FinishedRun(at.seq, job_id, job.about, given, job.said, measured, why))

    def _learn(self, at: At, job_id: str, job: LiveJob, given: Given) -> None:
        measured = whole_job(job.exits)._replace(total_gpus=given.gpus * max(1, len(job.workers)))
        steps, steps_aside, eta = None, "", None
        if job.progress is not None:
            steps, steps_aside = steps_of(job.progress)
            measured = measured._replace(**measured_steps(job.progress, steps))
            eta = job.progress.eta_at_half(at.now_ms)
        why = doubt(measured, given)
        if why:
            self.set_aside += 1
            self.reasons[why.partition(":")[0]] += 1
        else:
            self.history.add(job.about.key, measured, job.about.owner)
            self.nearest.add(job.about, measured)
            self.past_cores.add(job.about, given, measured)
            self.killed.ran(job.about, 0 if job.said is None else job.said.host_memory_mib)
        if self._finished is not None:
            run = FinishedRun(at.seq, job_id, job.about, given, job.said, measured, why)
            self._finished(run._replace(steps=steps, steps_aside=steps_aside, eta=eta))

    def _forget_attempt(self, job: LiveJob) -> None:
        for task_id in job.workers:
            self._job_of_task.pop(task_id, None)
        job.workers = {}
        job.given = None
        job.exits = []
        job.partly = False

    def _node(self, at: At, fact: external_events.NodeJoined | external_events.NodeChanged) -> None:
        self.cards[fact.node.node_id] = card_of(fact.node)
        self.node_sizes.put(fact.node.node_id, self.cards[fact.node.node_id].model, len(fact.node.gpus))
        self.rooms.put(fact.node)

    def _progress(self, task_id: str) -> Progress | None:
        job = self.live.get(self._job_of_task.get(task_id, ""))
        return None if job is None else job.progress

    def _started(self, at: At, fact: external_events.TaskStarted) -> None:
        if (progress := self._progress(fact.task_id)) is not None:
            progress.start(fact.task_id, fact.started_ms, at.now_ms)

    def _phase(self, at: At, fact: external_events.TaskPhaseChanged) -> None:
        if (progress := self._progress(fact.task_id)) is not None:
            progress.change(fact.task_id, fact.phase, fact.at_ms)

    def _stepped(self, at: At, fact: external_events.StepsMeasured) -> None:
        progress = self._progress(fact.task_id)
        telling = Telling(fact.at_ms, fact.done, fact.total, fact.steps, fact.step_ms, fact.loss)
        if progress is not None and progress.step(fact.task_id, telling, at.now_ms):
            job_id = self._job_of_task[fact.task_id]
            self.stepped[job_id] = at.event_id or f"{job_id}-{at.seq}"

    def _told(self, at: At, fact: external_events.EtaEstimated) -> None:
        job = self.live.get(fact.job_id)
        if job is not None and job.progress is not None and job.progress.attempt == fact.attempt:
            left = Bounds(fact.left_ms.middle, fact.left_ms.low, fact.left_ms.high)
            job.progress.tell(Told(fact.at_ms, left, fact.done))

    def _node_lost(self, at: At, fact: ledger_events.NodeLost) -> None:
        self.rooms.remove(fact.node_id)
        self.node_sizes.remove(fact.node_id)

    def _stages(self, at: At, fact: external_events.StagesMeasured) -> None:
        job = self.live.get(self._job_of_task.get(fact.task_id, ""))
        if job is None or job.given is None or not self.learning:
            return
        gpus = job.given.gpus * len(job.workers)
        self._keep_stages(
            at, self.stages.measured(job.about, gpus, job.given.gpu_share_milli, fact, at.event_id)
        )

    def _stages_told(self, at: At, fact: external_events.StagesProfiled) -> None:
        if self.learning:
            self._keep_stages(at, self.stages.told(fact))

    def _keep_stages(self, at: At, row: Owned | None) -> None:
        if row is not None and self._staged is not None:
            self._staged(at.seq, row)


def whole_job(exits: list[Run]) -> Run:
    """One run from its workers' exits (at least one): the largest of each field, the mean of utilisation."""
    columns = [[value for value in column if value == value] for column in zip(*exits, strict=True)]
    largest = Run(*(max(column) if column else UNKNOWN for column in columns))
    utilisation = columns[Run._fields.index("gpu_utilisation_percent")]
    if not utilisation:
        return largest
    return largest._replace(gpu_utilisation_percent=sum(utilisation) / len(utilisation))


HANDLERS: Mapping[str, Callable[[Ledger, At, Any], None]] = MappingProxyType(
    {
        wire_type(external_events.JobSubmitted): Ledger._submitted,
        wire_type(external_events.JobEstimated): Ledger._estimated,
        wire_type(ledger_events.PlacementDecided): Ledger._placed,
        wire_type(external_events.TaskExited): Ledger._exited,
        wire_type(ledger_events.JobEnded): Ledger._ended,
        wire_type(external_events.NodeJoined): Ledger._node,
        wire_type(external_events.NodeChanged): Ledger._node,
        wire_type(external_events.TaskStarted): Ledger._started,
        wire_type(external_events.TaskPhaseChanged): Ledger._phase,
        wire_type(external_events.StepsMeasured): Ledger._stepped,
        wire_type(external_events.EtaEstimated): Ledger._told,
        wire_type(ledger_events.NodeLost): Ledger._node_lost,
        wire_type(external_events.StagesMeasured): Ledger._stages,
        wire_type(external_events.StagesProfiled): Ledger._stages_told,
    }
)
"""Wire type of a fact → what it does to the fold."""
