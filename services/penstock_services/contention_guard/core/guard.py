"""State machine of the contention-guard beside the fold of the ledger: when cores and caps of running tasks
are changed, and how.

Its driver (the service's shell, or a simulation) folds the ledger and passes each fact after it was folded,
and each window of telemetry that has changed:

    guard.see(state, fact, now_ms)
    guard.observe(state, window, now_ms)
    while (proposal := guard.next(state, now_ms)) is not None: ...  # send it
    guard.due_ms(state)                       # call `next` again at that time, even without news

One proposal per task is under way at a time. Its state beside the ledger's follows from telemetry, and is
lost at a restart: an interrupted search gives back the cores of the placement, and a training's best speed is
learned anew.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.adjustments import (
    RENEWED_AFTER_MS,
    BandwidthDecided,
    CoresDecided,
    TaskAdjusted,
)
from penstock.model.decisions.ledger_events import ProposalAnswered
from penstock.model.inputs import external_events
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.nouns.types import MAX_TEXT
from penstock.model.proposals import ANSWER_WITHIN_MS, CoresProposed, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.proposals.validate import validate
from penstock.scheduling.acting.eliminator import Change, NodeView, calm_after_ms, released, throttled
from penstock.scheduling.acting.guard import PROPOSER, Guard
from penstock.scheduling.acting.settling import Speed, speed_of
from penstock.scheduling.acting.telemetry_windows import NodeWindow, clock_came_back
from penstock.scheduling.profiles import known_profile
from penstock.scheduling.remaining_time import remaining_s
from penstock_services.contention_guard.core.paces import Node, Pace
from penstock_services.contention_guard.core.searches import Search, alone, most_of, search_of, takes_ms
from penstock_services.contention_guard.core.views import pressure, runs, slowed, with_tasks

RETRY_MS = 30_000
"""A refused change of a task is not proposed again for so long."""

Adjusting = CoresProposed | ThrottleProposed


class _Sent(NamedTuple):
    """A proposal that the placer has not answered yet, or has refused:
    nothing is proposed for the task until then."""

    proposal_id: str
    until_ms: int
    probe: bool = False


def _stage(settings: PlacerSettings) -> Guard | None:
    """None: under these settings nothing is adjusted."""
    profile = known_profile(settings)
    return None if profile is None else profile.guard


def guards(settings: PlacerSettings) -> bool:
    """Whether there is anything for a contention-guard to do under these settings."""
    return _stage(settings) is not None


class ContentionGuard:
    """`observed`: how many windows were used;
    `unsettled`: how many searches ended without a speed that settled."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._paces: dict[str, Pace] = {}
        """By task id, of running tasks with telemetry."""
        self._searches: dict[str, Search] = {}
        """By job id, of jobs whose cores are being searched for."""
        self._jobs_due: dict[str, None] = {}
        self._nodes_due: dict[str, None] = {}
        self._steps: dict[str, list[Change]] = {}
        """By node id, changes of a decided step that are not proposed yet: one step is for all tasks of a
        node, whenever the placer answers."""
        self._sent: dict[str, _Sent] = {}
        """By task id."""
        self._timers: list[tuple[int, str, str]] = []
        """(at ms, job id or empty, node id or empty)."""
        self._begun = False
        self.observed = 0

    def seen_of(self, state: CellState, task_id: str) -> Mapping[str, float]:
        """Telemetry of the node on which a task runs, for a trace."""
        node = self._nodes.get(self._node_of(state, task_id), Node())
        found = {
            "penstock.memory_bandwidth": node.bandwidth,
            "penstock.cpu_stalled": node.stalled,
            "penstock.window_ms": float(node.latest_ms),
        }
        return {name: value for name, value in found.items() if value is not None}

    # ------------------------------------------------------------------------------------------ inputs

    def see(self, state: CellState, fact: Event, now_ms: int) -> None:
        """Takes a fact that has just been folded."""
        if (subject := CHANGES.get(type(fact))) is not None:
            self._changed(state, subject(fact), getattr(fact, "node_id", ""), getattr(fact, "task_id", ""))
        elif isinstance(fact, ProposalAnswered):
            if fact.proposer == PROPOSER:
                self._answered(state, fact, now_ms)
        elif isinstance(fact, DECIDED):
            self._decided(state, fact, now_ms)
        elif isinstance(fact, TaskAdjusted):
            self._adjusted(state, fact, now_ms)

    def _answered(self, state: CellState, fact: ProposalAnswered, now_ms: int) -> None:
        task_id = next(
            (key for key, sent in self._sent.items() if sent.proposal_id == fact.proposal_id), None
        )
        if task_id is None:
            return
        sent = self._sent.pop(task_id)
        job_id = _job_id(task_id)
        if fact.verdict == "refused":
            self._refused(state, task_id, sent.probe, fact.detail, now_ms)
        self._jobs_due[job_id] = None
        self._nodes_due[self._node_of(state, task_id)] = None

    def _refused(self, state: CellState, task_id: str, probe: bool, why: str, now_ms: int) -> None:
        """A probe is not repeated; any other change waits."""
        search = self._searches.get(_job_id(task_id))
        if search is not None:
            search.refused(why)
        if search is None or not probe:
            self._waits(state, task_id, _Sent("", now_ms + RETRY_MS))

    def _waits(self, state: CellState, task_id: str, sent: _Sent) -> None:
        """Nothing is proposed for the task until then."""
        self._sent[task_id] = sent
        heapq.heappush(self._timers, (sent.until_ms, _job_id(task_id), self._node_of(state, task_id)))

    def _node_of(self, state: CellState, task_id: str) -> str:
        """Empty: the task does not exist any more."""
        job = state.jobs.get(_job_id(task_id))
        task = None if job is None else job.tasks.get(task_id)
        return "" if task is None else task.place.node_id

    def _decided(self, state: CellState, fact: CoresDecided | BandwidthDecided, now_ms: int) -> None:
        """A training has other cores: its speed changes from now on. A training whose cores an operator has
        set is left alone."""
        node = self._nodes.setdefault(fact.node_id, Node())
        if isinstance(fact, CoresDecided):
            if (pace := self._paces.get(fact.task_id)) is not None:
                pace.begin(node.latest_ms)
            if fact.by != PROPOSER:  # an operator
                self._searches.pop(fact.job_id, None)
        self._jobs_due[fact.job_id] = None
        node.after_ms, node.changed_ms = node.latest_ms, now_ms
        if fact.cause == "contention":
            self._renews_at(fact.node_id, now_ms + RENEWED_AFTER_MS)

    def _renews_at(self, node_id: str, at_ms: int) -> None:
        """Looks at the node again then: its throttles are renewed, or end without the guard."""
        heapq.heappush(self._timers, (at_ms, "", node_id))

    def _adjusted(self, state: CellState, fact: TaskAdjusted, now_ms: int) -> None:
        node = self._nodes.setdefault(fact.node_id, Node())
        node.after_ms, node.changed_ms = node.latest_ms, now_ms
        if (pace := self._paces.get(fact.task_id)) is not None and fact.what == "cores":
            pace.begin(node.latest_ms)
        self._jobs_due[_job_id(fact.task_id)] = None
        self._nodes_due[fact.node_id] = None

    def _changed(self, state: CellState, job_id: str, node_id: str, task_id: str) -> None:
        job = state.jobs.get(job_id)
        search = self._searches.get(job_id)
        if search is not None and (
            job is None or job.attempt != search.attempt or job.status is not JobStatus.RUNNING
        ):
            del self._searches[job_id]
        if task_id and (job is None or task_id not in job.tasks or not runs(job.tasks[task_id])):
            self._paces.pop(task_id, None)
            self._sent.pop(task_id, None)
        self._jobs_due[job_id] = None
        nodes = [node_id] if node_id else []
        if not nodes and job is not None:
            nodes = [one.place.node_id for one in job.tasks.values()]
        for each in nodes:
            self._steps.pop(each, None)
            self._nodes_due[each] = None

    def observe(self, state: CellState, window: NodeWindow, now_ms: int) -> None:
        """Takes a window that has changed, or is delivered again. Entries of tasks that do not run are
        ignored; times are the reader's clock, not a node's."""
        if _stage(state.settings) is None or window.node_id not in state.nodes:
            return
        node = self._nodes.setdefault(window.node_id, Node())
        if window.begin_ms < node.latest_ms:
            if not clock_came_back(node.latest_ms, window.begin_ms):
                return
            self._clock_came_back(state, node, window)
        self.observed += 1
        node.observe(window)
        for task_id in sorted(window.tasks):
            job = state.jobs.get(_job_id(task_id))
            task = None if job is None else job.tasks.get(task_id)
            if job is None or task is None or not runs(task) or task.place.node_id != window.node_id:
                continue
            self._paces.setdefault(task_id, Pace()).observe(window.begin_ms, window.tasks[task_id], now_ms)
            search = self._searches.get(job.job_id)
            if search is None:
                search = self._search(state, job, speed_of(window.tasks[task_id]))
            if search is not None and search.workers[0] == task_id:
                search.most = most_of(state, search.workers) or search.most
                search.observe(window.begin_ms, window.tasks[task_id], now_ms)
                self._jobs_due[job.job_id] = None
        self._nodes_due[window.node_id] = None
        if not pressure(state, state.nodes[window.node_id], node, self._paces).low:
            node.calm_since_ms = None
        elif node.calm_since_ms is None:
            node.calm_since_ms = now_ms

    def _clock_came_back(self, state: CellState, node: Node, window: NodeWindow) -> None:
        """What was measured counts on; windows from this one on are newer."""
        node.clock_came_back(window.begin_ms)
        for task_id, job_id in state.nodes[window.node_id].tasks.items():
            if (pace := self._paces.get(task_id)) is not None:
                pace.clock_came_back(window.begin_ms)
            search = self._searches.get(job_id)
            if search is not None and search.settling is not None and search.workers[0] == task_id:
                search.settling.clock_came_back(window.begin_ms)

    def _search(self, state: CellState, job: JobState, speed: Speed | None = None) -> Search | None:
        """Begins with the first report of a job whose cores may be searched for; not for a job that is
        expected to end before."""
        stage = _stage(state.settings)
        if stage is None or job.status is not JobStatus.RUNNING:
            return None
        if speed is not None and 1_000 * remaining_s(state, job) < takes_ms(speed):
            return None
        first = next(iter(job.tasks.values())).place.node_id
        found = search_of(state, job, stage, self._nodes.setdefault(first, Node()).latest_ms - 1)
        if found is not None:
            self._searches[job.job_id] = found
        return found

    # ------------------------------------------------------------------------------------------ outputs

    def due_ms(self, state: CellState) -> int | None:
        """Ledger time from which `next` has something to do; None: nothing before another input."""
        if state.frozen or _stage(state.settings) is None:
            return None
        if self._jobs_due or self._nodes_due or self._steps or not self._begun:
            return state.now_ms
        return self._timers[0][0] if self._timers else None

    def next(self, state: CellState, now_ms: int) -> Adjusting | None:
        """The next proposal. `now_ms`: the ledger's time, which goes on without records. If a stage raises,
        its job or node is not due any more: each input leads to one attempt."""
        stage = _stage(state.settings)
        if state.frozen or stage is None:
            self._nodes_due.update(dict.fromkeys(self._steps))
            self._steps.clear()
            return None
        self._begin(state)
        self._fire(now_ms)
        if (proposal := self._of_steps(state, now_ms)) is not None:
            return proposal
        while self._jobs_due:
            job_id = next(iter(self._jobs_due))
            del self._jobs_due[job_id]
            if (proposal := self._of_job(state, job_id, now_ms)) is not None:
                self._jobs_due[job_id] = None
                return proposal
        while self._nodes_due:
            node_id = next(iter(self._nodes_due))
            del self._nodes_due[node_id]
            if stage.eliminates:
                self._steps[node_id] = self._step(state, stage, node_id, now_ms)
                if (proposal := self._of_steps(state, now_ms)) is not None:
                    return proposal
        return None

    def _of_steps(self, state: CellState, now_ms: int) -> Adjusting | None:
        """The next proposal of the steps that were decided."""
        while self._steps:
            node_id, step = next(iter(self._steps.items()))
            while step:
                if (proposal := self._proposed(state, step.pop(0), now_ms)) is not None:
                    return proposal
            del self._steps[node_id]
        return None

    def _begin(self, state: CellState) -> None:
        """Takes the jobs of a snapshot that was loaded before the first fact."""
        if self._begun:
            return
        self._begun = True
        for job in state.holding.values():
            self._jobs_due[job.job_id] = None
            if any(task.cores.probes and not task.cores.settled for task in job.tasks.values()):
                self._search(state, job)
            for task in job.tasks.values():
                for latest in (task.cores.adjusted, task.bandwidth_adjusted):
                    if latest is not None and latest.by == PROPOSER:
                        self._renews_at(task.place.node_id, latest.at_ms + RENEWED_AFTER_MS)
        self._nodes_due.update(dict.fromkeys(state.nodes))

    def _fire(self, now_ms: int) -> None:
        while self._timers and self._timers[0][0] <= now_ms:
            _, job_id, node_id = heapq.heappop(self._timers)
            if job_id:
                self._jobs_due[job_id] = None
            if node_id:
                self._nodes_due[node_id] = None

    def _of_job(self, state: CellState, job_id: str, now_ms: int) -> Adjusting | None:
        job, search = state.jobs.get(job_id), self._searches.get(job_id)
        if job is None or search is None or job.attempt != search.attempt:
            return None
        if search.ended or alone(job):
            search.advance(now_ms)
        else:
            search.end(search.start, "it takes turns with others on its GPUs")
        node_id = job.tasks[search.workers[0]].place.node_id
        search.answered(job, self._nodes.setdefault(node_id, Node()).latest_ms, now_ms)
        wanted = search.wanted(job)
        if search.ended and not wanted:
            del self._searches[job_id]
            return None
        for one in wanted:
            if (proposal := self._proposed(state, one, now_ms)) is not None:
                return proposal
            if search.ended and one.cause == "probe":  # the placer would refuse it on this state
                return self._of_job(state, job_id, now_ms)
        if search.due_ms is not None:
            heapq.heappush(self._timers, (search.due_ms, job_id, ""))
        return None

    def _step(self, state: CellState, stage: Guard, node_id: str, now_ms: int) -> list[Change]:
        """What is changed now on a node, all at once."""
        spec = state.nodes.get(node_id)
        if spec is None:
            self._nodes.pop(node_id, None)
            return []
        node = self._nodes.setdefault(node_id, Node())
        view = pressure(state, spec, node, self._paces)
        if not view.high and not slowed(state, spec):
            return []
        view = with_tasks(view, state, spec, node, self._paces, now_ms)
        if not view.others:
            return []
        changes = self._released(node, view, now_ms)
        if not changes and not any(self._under_way(other.task_id, now_ms) for other in view.others):
            changes = list(throttled(view, halves=stage.halves)) or list(_renewed(state, view, now_ms))
        if view.high:
            for training in view.trainings:
                pace = self._paces.get(training.task_id)
                if pace is not None and (at_ms := pace.counts_ms(node)) > now_ms:
                    heapq.heappush(self._timers, (at_ms, "", node_id))
        return changes

    def _released(self, node: Node, view: NodeView, now_ms: int) -> list[Change]:
        """Releases of slowed jobs, which count as one; else sets the time of the next check."""
        if not any(other.throttled for other in view.others):
            return []
        if not view.trainings:
            return list(released(view, calm=False))
        if node.calm_since_ms is None:
            return []
        calm_ms = max(node.calm_since_ms, node.changed_ms) + calm_after_ms(node.releases)
        if now_ms < calm_ms:
            heapq.heappush(self._timers, (calm_ms, "", view.node_id))
            return []
        found = list(released(view, calm=True))
        if found:
            node.releases += 1
            node.calm_since_ms = now_ms  # what is not released now waits again, also where no report comes
        return found

    def _under_way(self, task_id: str, now_ms: int) -> bool:
        """Whether a proposal for the task has no answer yet."""
        sent = self._sent.get(task_id)
        return sent is not None and bool(sent.proposal_id) and now_ms < sent.until_ms

    # ------------------------------------------------------------------------------------------ proposals

    def _proposed(self, state: CellState, change: Change, now_ms: int) -> Adjusting | None:
        """The proposal, unless one is under way for the task; a proposal that the placer would refuse on this
        state is not sent."""
        task_id, cores = change.task_id, change.cores
        sent = self._sent.get(task_id)
        if sent is not None and now_ms < sent.until_ms:
            return None
        kind = "throttle" if cores is None else "cores"
        about: dict[str, Any] = {
            "proposal_id": f"{kind}-{state.seq}-{blake2b(task_id.encode(), digest_size=6).hexdigest()}",
            "proposer": PROPOSER,
            "task_id": task_id,
            "cause": change.cause,
            "reason": change.reason[:MAX_TEXT],
        }
        proposal: Adjusting = (
            ThrottleProposed(**about, memory_bandwidth_percent=change.cap)
            if cores is None
            else CoresProposed(**about, cores=cores)
        )
        probe = proposal.cause == "probe"
        verdict = validate(state, proposal)
        if not verdict.accepted:
            self._refused(state, task_id, probe, verdict.detail, now_ms)
            return None
        self._waits(state, task_id, _Sent(proposal.proposal_id, now_ms + ANSWER_WITHIN_MS, probe))
        return proposal


def _renewed(state: CellState, view: NodeView, now_ms: int) -> Iterator[Change]:
    """Throttles that are still needed and would end soon: the same again."""
    for other in view.others:
        task = state.jobs[_job_id(other.task_id)].tasks[other.task_id]
        capped = other.cap is not None
        latest = task.bandwidth_adjusted if capped else task.cores.adjusted
        if not other.throttled or latest is None or now_ms - latest.at_ms < RENEWED_AFTER_MS:
            continue
        why = f"still slowed for the training on {view.node_id}, {view.pressure}"
        yield Change(other.task_id, "contention", why, *((None, other.cap) if capped else (other.cores,)))


def _job_id(task_id: str) -> str:
    return task_id.rsplit(".", 2)[0]


def _job_of_task(fact: Any) -> str:
    return _job_id(str(fact.task_id))


def _job(fact: Any) -> str:
    return str(fact.job_id)


DECIDED = (CoresDecided, BandwidthDecided)
CHANGES: Mapping[type[Event], Callable[[Any], str]] = MappingProxyType(
    {
        external_events.TaskStarted: _job_of_task,
        external_events.TaskExited: _job_of_task,
        ledger_events.TaskLost: _job_of_task,
        ledger_events.StopDecided: _job,
        ledger_events.JobRequeued: _job,
        ledger_events.JobEnded: _job,
    }
)
"""Ledger events after which a job starts or stops being measured, or its node's tasks change → the function
that gives its job id."""
