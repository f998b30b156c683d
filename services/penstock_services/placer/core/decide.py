"""Every choice of the placer. Reads the state, writes nothing: decisions are yielded one by one, and the step
folds each before it asks for the next, so that a later choice sees the earlier ones.

One decider lives as long as its settings; it holds no state of its own that a decision could depend on.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.cluster.capacity import never_fits
from penstock.cluster.chance import LazyRng
from penstock.cluster.view import ClusterView, assign
from penstock.errors import one_line
from penstock.ledger.fold.evolve_tasks import job_of_task
from penstock.ledger.fold.plans import proposal_key, reserved_nodes, units_of_proposals
from penstock.ledger.state.job.job_state import HOLDING, JobState
from penstock.ledger.state.lease import LEASE_TIMER
from penstock.ledger.state.node.distrust import TRUST_TIMER
from penstock.ledger.state.state import CellState
from penstock.model.decisions import ledger_events
from penstock.model.decisions.ledger_events import PlacementExplanation
from penstock.model.decisions.plans import BatchWindowClosed
from penstock.model.inputs import external_events
from penstock.model.inputs.estimates import EtaEstimated, JobEstimated
from penstock.model.inputs.followers import FollowerChanged
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.proposals import CoresProposed, MigrationProposed, PlanProposed, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.scheduling.liveness import fits_now
from penstock.scheduling.place.moldable import place_moldable
from penstock.scheduling.place.preferring import preferring
from penstock.scheduling.profiles import in_force, profile_for
from penstock.scheduling.scheduling_pass import Failed, Starts, Waits
from penstock.scheduling.stages.protocols import Choose
from penstock.scheduling.stages.regroup import may_help, regroups
from penstock_services.placer.core.common import (
    RESCHEDULE,
    continuation,
    request_plan,
    start_deadline,
    stop,
)
from penstock_services.placer.core.members import evidence, followers, silent_nodes
from penstock_services.placer.core.members.membership import Membership
from penstock_services.placer.core.plans import adjustments, moves, promises, proposals, units
from penstock_services.placer.core.plans.adjustments import asked_to_save, frees
from penstock_services.placer.core.plans.plans import carry_out_plan
from penstock_services.placer.core.still_waiting import StillWaiting
from penstock_services.placer.core.waiting import making_way, prelaunching, window
from penstock_services.placer.core.waiting.behind import Behind
from penstock_services.placer.core.waiting.placing import Asking, Choice, Chosen, Placing, holds_up
from penstock_services.placer.core.waiting.reclaiming import Reclaiming
from penstock_services.placer.core.waiting.retries import Attempts


class Decider:
    """The choices under one set of settings."""

    def __init__(self, settings: PlacerSettings) -> None:
        self.settings = in_force(settings)
        self.profile = profile_for(self.settings)
        self.attempts = Attempts(
            replans=self.profile.preempt is not None,
            grace_ms=self.settings.unschedulable_grace_ms,
            explain=lambda why: self.explanations.append(why),
        )
        self.membership = Membership(self.attempts, self.settings)
        self._still_waiting = StillWaiting()
        self._behind = Behind(self.settings, self.profile, self._try)
        self.explanations: list[PlacementExplanation] = []
        """Of the placements decided in the current step, in order."""
        self.errors: list[Exception] = []
        """What was raised in the current step."""
        self.failed_jobs: dict[str, str] = {}
        """Job → error of those on which the policy has failed in the current step."""
        self._known_failures: Mapping[str, str] = {}
        self._rng = LazyRng(self.settings.seed)

    def failed(self, error: Exception) -> str:
        """Notes what deciding raised; returns it in one line. The policy, which may be in disorder, is made
        anew."""
        self.errors.append(error)
        self.profile = profile_for(self.settings)
        return one_line(error)

    @property
    def used_rng(self) -> bool:
        """Whether any decision so far used random numbers."""
        return self._rng.used

    def decide(
        self, state: CellState, event: Event, event_id: str, failed: Mapping[str, str]
    ) -> Iterator[Event]:
        """The decisions that follow from an event already folded. `event_id` seeds the random generator.

        `failed`: job → error of those on which the policy is known to fail in this very step.
        """
        self.explanations, self.errors, self.failed_jobs = [], [], {}
        self._known_failures = failed
        self._rng.seed(event_id)
        choose = CHOICES.get(type(event))
        return iter(()) if choose is None else choose(self, state, event)

    # ------------------------------------------------------------------------------------------ jobs

    def _submitted(
        self, state: CellState, event: external_events.JobSubmitted | external_events.JobReleaseRequested
    ) -> Iterator[Event]:
        yield from self.attempts.queue_timeout(state, job := state.jobs[event.job_id])
        yield from followers.submitted(state, event)
        if job.in_line:
            yield from self._arrived(state, job)

    def _estimated(self, state: CellState, event: JobEstimated) -> Iterator[Event]:
        job = state.jobs.get(event.job_id)
        if job is not None and job.in_line:
            yield from self._arrived(state, job)

    def _cancel(self, state: CellState, event: external_events.JobCancelRequested) -> Iterator[Event]:
        job = state.jobs[event.job_id]
        if job.status in HOLDING:
            yield from stop(state, job, "cancelled", event.reason)
            return
        matters = state.head_of_queue() is job or job.job_id in state.planned
        yield ledger_events.JobEnded(job_id=job.job_id, outcome="cancelled", reason=event.reason)
        if matters:
            yield from self._freed(state)

    def _proposed(self, state: CellState, event: Any) -> Iterator[Event]:
        """A move or an adjustment."""
        freed = False
        for decision in proposals.answer(state, event, self.profile, self.explanations.append):
            freed = freed or frees(state, decision)
            yield decision
        if freed:
            yield from self._place_waiting(state)

    def _plan_proposed(self, state: CellState, event: PlanProposed) -> Iterator[Event]:
        """Other jobs are tried at once where the plan reserves less than the former one, and where a window
        was open for the plan; not while a regroup stage has another plan to make."""
        key, reserved = proposal_key(event.proposer, event.proposal_id), reserved_nodes(state)
        ends_window = key not in state.proposals and bool(state.window_until_ms)
        yield from proposals.answer(state, event, self.profile, self.explanations.append)
        if not reserved <= reserved_nodes(state):
            yield continuation(state)
        if ends_window and (self.profile.regroup is None or state.proposals[key].verdict == "accepted"):
            yield BatchWindowClosed(reason="answered")
            yield continuation(state)

    def _arrived(self, state: CellState, job: JobState) -> Iterator[Event]:
        """A job has just queued. Nothing was freed, so no other job is tried again, unless there is room that
        may have to be reserved."""
        reason = never_fits(state, job.demand) if state.nodes else None
        if reason is not None:
            yield from self.attempts.park(state, job, reason)
            return
        regroup, of_plan, demand = self.profile.regroup, False, job.demand
        if regroup is not None and regroups(demand) and may_help(state, regroup):
            of_plan = not regroup.beside or ClusterView(state).tasks_that_fit(demand) < demand.tasks
        if of_plan or regroup is None or regroup.beside:
            yield from window.arrived(state, regroups=of_plan)
        if state.in_window:
            return
        if self.profile.preempt is not None:
            yield from request_plan(state)
        elif self.profile.order is not None:
            yield from self._arrived_in_order(state, job)
        elif not state.frozen:
            yield from self._arrived_last(state, job)
        if job.spec.prelaunch and job.in_line:
            yield from self._look_ahead(state)

    def _arrived_in_order(self, state: CellState, job: JobState) -> Iterator[Event]:
        """Under a profile with its own order: where no node takes a worker of the job, no other job starts
        for its arrival."""
        need, where = job.demand.worker, job.demand.where
        if self.profile.backfill is None or state.index.candidates(need, where):
            yield from self._place_waiting(state)
        elif need.gpus and not state.frozen:
            yield from Reclaiming(self.profile, self.explanations.append).arrived(state, job)
            if job.spec.timed:
                yield from making_way.begin(state, self.profile, self.explanations.append, self.failed)

    def _arrived_last(self, state: CellState, job: JobState) -> Iterator[Event]:
        """First come, first served: the job comes last, and is tried alone."""
        if self._may_try(state, job):
            yield from self._try(state, job)
            if job.in_line and not state.holding:
                yield from self._behind.start(state, {job.job_id}, self.failed_jobs)
        elif fits_now(state, job.demand):
            yield from self._behind.start(state, set(), self.failed_jobs)

    def _may_try(self, state: CellState, job: JobState) -> bool:
        head = state.head_of_queue()
        held_up = head is None or holds_up(head, self.settings, self.failed_jobs)
        return head is job or (
            not held_up and state.queue.bisect_left(job.order) < self.settings.backfill_window
        )

    def _try(self, state: CellState, job: JobState, choose: Choose | None = None) -> Iterator[Event]:
        """Places the job if it fits. `choose`: instead of the place stage alone."""
        yield from self._facts_of(state, self._choose(state, job, choose))

    def _choose(self, state: CellState, job: JobState, choose: Choose | None = None) -> Chosen:
        """As `Asking.choose`. If its policy raises, this job waits on; that choice is lost and no other."""
        error = self._known_failures.get(job.job_id)
        if error is None:
            try:
                choose = choose or self.profile.place.place
                if state.planned and self.profile.preempt is None:
                    choose = units.beside(state, self.profile.name, choose)
                choose = preferring(job, choose)
                if job.spec.min_workers is None:
                    plan = choose(state, job, self._rng)
                else:
                    plan = place_moldable(state, job, choose, self._rng, self.profile.shape)
                if plan is None:
                    plan = units.on_its_nodes(state, self.profile.name, job)
                if plan is None:
                    return Waits(job)
                return Starts(job, Choice(assign(state, job, plan), plan.explanation))
            except Exception as raised:  # noqa: BLE001 - it becomes a fact and a dead letter
                error = self.failed(raised)
        self.failed_jobs[job.job_id] = error
        return Failed(job, error)

    def _facts_of(self, state: CellState, found: Chosen) -> Iterator[Event]:
        """As `Asking.facts`."""
        if isinstance(found, Starts):
            self.explanations.append(found.place.explanation)
            yield found.place.placement
            yield start_deadline(state, found.job)
        elif isinstance(found, Failed):
            yield ledger_events.ChoiceFailed(
                profile=self.settings.profile, job_id=found.job.job_id, error=found.error
            )

    def _freed(self, state: CellState) -> Iterator[Event]:
        """Something was freed, and not by a plan that is being carried out. Where the profile regroups, the
        plan says who gets it."""
        if self.profile.regroup is not None and may_help(state, self.profile.regroup):
            yield from window.freed(state)
        yield from self._place_waiting(state)

    def _place_waiting(self, state: CellState, *, made_way: bool = False) -> Iterator[Event]:
        """Something was freed: waiting units and jobs are tried, or a plan is requested. `made_way`: as in
        `units.carry_on`."""
        if state.moving:
            yield from moves.give_up_lost(state)
        if self.profile.preempt is not None:
            yield from request_plan(state)
            return
        yield from units.carry_on(state, self.explanations.append, self._still_waiting, made_way=made_way)
        yield from (reclaiming := Reclaiming(self.profile, self.explanations.append)).begin(state)
        if state.frozen or not state.queue or state.in_window:
            return
        asking = Asking(self._choose, self._facts_of, self._known_failures, self.failed_jobs)
        placing = Placing(state, self.profile, self.settings, asking, reclaiming, self.attempts)
        yield from placing.facts()
        if placing.full:
            return
        if placing.leaves_others():
            yield from self._behind.start(state, placing.tried, self.failed_jobs, placing.chooser())
        yield from placing.done()
        yield from self._look_ahead(state)

    def _look_ahead(self, state: CellState) -> Iterator[Event]:
        """Who makes way for whom, and who may launch where another job comes to its end."""
        yield from making_way.begin(state, self.profile, self.explanations.append, self.failed)
        yield from prelaunching.begin(state, self.profile, self.explanations.append)

    def _phase_changed(self, state: CellState, event: external_events.TaskPhaseChanged) -> Iterator[Event]:
        yield from prelaunching.phase_changed(state, event)
        if event.phase == "save":
            yield from self._look_ahead(state)

    def _progressed(
        self, state: CellState, event: external_events.WorkProgressed | EtaEstimated
    ) -> Iterator[Event]:
        if self.profile.preempt is not None:
            yield from request_plan(state)
        yield from self._look_ahead(state)

    def _started(self, state: CellState, event: external_events.TaskStarted) -> Iterator[Event]:
        job = job_of_task(state, event.node_id, event.task_id)
        yield from evidence.started(state, job, event.node_id)
        yield from self.attempts.run_timeout(state, job)
        if state.nodes[event.node_id].status is NodeStatus.SUSPECT:
            yield from self._node_recovered(state, event.node_id)
            yield from self._freed(state)
        elif job is not None and job.status is JobStatus.RUNNING:
            yield from self._look_ahead(state)

    def _exited(
        self, state: CellState, event: external_events.TaskExited | external_events.OrderRefused
    ) -> Iterator[Event]:
        if state.nodes[event.node_id].status is NodeStatus.SUSPECT:
            yield from self._node_recovered(state, event.node_id)
        job = state.jobs.get(event.task_id.rsplit(".", 2)[0])
        if job is None or event.task_id not in job.tasks:  # the cell had given it up
            yield from self.membership.thaw(state)
            yield from self._place_waiting(state)
        else:
            made_way = job.comes_back
            if isinstance(event, external_events.TaskExited):
                yield from evidence.judged(state, job, event)
            yield from self.attempts.after_exit(state, job)
            if not made_way and self.profile.batch is not None:
                yield from window.freed_in_burst(state)
            if not made_way and job.status not in HOLDING:
                yield from self._freed(state)
            else:
                yield from self._place_waiting(state, made_way=made_way)

    def _suspected(self, state: CellState, event: external_events.NodeSuspected) -> Iterator[Event]:
        yield from silent_nodes.probe(state.nodes[event.node_id])
        if event.node_id in reserved_nodes(state):
            yield from self._freed(state)

    def _node_recovered(self, state: CellState, node_id: str) -> Iterator[Event]:
        """A Suspect node that reports is alive."""
        node = state.nodes[node_id]
        if node.status is NodeStatus.SUSPECT and not node.leaving and not silent_nodes.awaits_answer(node):
            yield ledger_events.NodeRestored(node_id=node_id)

    def _joined(self, state: CellState, event: external_events.NodeJoined) -> Iterator[Event]:
        yield from self.membership.joined(state, event)
        yield from adjustments.without_end(state, event.node.node_id)
        yield from self._freed(state)

    def _changed(self, state: CellState, event: external_events.NodeChanged) -> Iterator[Event]:
        yield from self.membership.reconsider(state)
        yield from self._freed(state)

    def _cordoned(self, state: CellState, event: external_events.NodeCordoned) -> Iterator[Event]:
        if event.drain:
            yield from self.membership.drain(state)
        yield from self._target_lost(state, event)

    def _target_lost(self, state: CellState, event: Any) -> Iterator[Event]:
        """Something may not be used any more. Where targets of moves are given up, others may have the
        rest."""
        given_up = bool(units_of_proposals(state))
        for decision in moves.give_up_lost(state):
            given_up = True
            yield decision
        if given_up:
            yield from self._freed(state)

    def _left(self, state: CellState, event: external_events.NodeLeft) -> Iterator[Event]:
        yield from self.membership.left(state, event)
        if event.proof == "fenced" or not state.frozen:
            yield from self._freed(state)

    def _reschedule(self, state: CellState) -> Iterator[Event]:
        """Everything that a full record left over, then the plan or the queue. Each part is empty when it is
        done."""
        if not state.frozen:
            yield from self.membership.accept_losses(state)
        if state.index.cordoned:
            yield from self.membership.drain(state)
        if state.unschedulable:
            yield from self.membership.reconsider(state)
        if self.profile.preempt is None:
            yield from self._place_waiting(state)
            return
        if state.moving:
            yield from moves.give_up_lost(state)
        yield from self.membership.sweep_queue(state)
        if state.in_window:
            return
        yield from carry_out_plan(state, self.profile, self._try, self.explanations.append, self.failed_jobs)
        if not (state.planned or state.stopping or state.frozen):
            yield from self._behind.start(state, set(), self.failed_jobs)

    def _fired(self, state: CellState, event: ledger_events.TimerFired) -> Iterator[Event]:
        if event.timer_id == RESCHEDULE:
            yield from self._reschedule(state)
            return
        if event.timer_id == window.WINDOW:
            yield from window.over(state)
            yield from self._place_waiting(state)
            return
        if event.timer_id == prelaunching.ENDING:
            yield from self._look_ahead(state)
            return
        subject, _, kind = event.timer_id.rpartition(":")
        if kind == LEASE_TIMER:
            yield from silent_nodes.due(state, subject)
            return
        if kind == TRUST_TIMER:
            yield from evidence.due(state, subject)
            yield from self._freed(state)
            return
        job = state.jobs.get(subject)
        if job is not None:
            yield from self._job_timer(state, job, kind)

    def _job_timer(self, state: CellState, job: JobState, kind: str) -> Iterator[Event]:
        """A timer of the job has fired; nothing where its attempt has got further."""
        match kind:
            case "backoff" if job.status is JobStatus.BACKOFF:
                yield ledger_events.JobQueued(job_id=job.job_id)
                yield from self.attempts.queue_timeout(state, job)
                yield from self._arrived(state, job) if job.in_line else ()
            case "queue_timeout" if job.status in (JobStatus.SUBMITTED, JobStatus.QUEUED):
                yield ledger_events.JobEnded(
                    job_id=job.job_id, outcome="timed_out_queued", reason="waited longer than queue_timeout"
                )
                yield from self._freed(state)
            case "queue_timeout" if job.status is JobStatus.LAUNCHING and job.held is None:
                yield from stop(state, job, "queue_timeout")
            case "run_timeout" if job.status is JobStatus.RUNNING:
                yield from stop(state, job, "run_timeout")
            case "launch_timeout" if job.status is JobStatus.LAUNCHING:
                if (yield from silent_nodes.unanswered(state, job, TaskStatus.ASSIGNED, "start")):
                    yield from self.attempts.waits_on(state, job)
            case "follower" if (gone := followers.gone(job)) is not None:
                yield from self._cancel(state, gone)
            case promises.TURNS:
                yield from promises.due(state, self.profile, job)
            case "adjustment":
                yield from adjustments.expired(state, job)
            case "predecessor_timeout":
                yield from prelaunching.late(state, job)
            case "stop_timeout" if job.status is JobStatus.STOPPING:
                yield from silent_nodes.unanswered(state, job, TaskStatus.STOPPING, "stop")
            case "unschedulable" if job.unschedulable:
                yield ledger_events.JobEnded(
                    job_id=job.job_id, outcome="unschedulable", reason=job.unschedulable
                )


CHOICES: Mapping[type[Event], Callable[[Decider, CellState, Any], Iterator[Event]]] = MappingProxyType(
    {
        external_events.JobSubmitted: Decider._submitted,
        JobEstimated: Decider._estimated,
        external_events.JobCancelRequested: Decider._cancel,
        FollowerChanged: lambda _, state, event: followers.changed(state, event),
        external_events.JobHoldRequested: lambda decider, state, _: decider._freed(state),
        external_events.JobReleaseRequested: Decider._submitted,
        external_events.JobCheckpointRequested: lambda _, state, event: asked_to_save(state, event),
        external_events.TaskStarted: Decider._started,
        external_events.TaskPhaseChanged: Decider._phase_changed,
        external_events.StepsMeasured: lambda own, state, event: promises.measured(state, own.profile, event),
        external_events.TaskExited: Decider._exited,
        external_events.OrderRefused: Decider._exited,
        external_events.NodeJoined: Decider._joined,
        external_events.NodeChanged: Decider._changed,
        external_events.WorkProgressed: Decider._progressed,
        EtaEstimated: Decider._progressed,
        external_events.NodeSuspected: Decider._suspected,
        external_events.ProbeSent: lambda _, state, event: silent_nodes.sent(state, event.node_id),
        external_events.NodeCordoned: Decider._cordoned,
        external_events.NodeUncordoned: lambda decider, state, _: decider._freed(state),
        external_events.GpuFaulted: Decider._target_lost,
        external_events.NodeLeft: Decider._left,
        PlanProposed: Decider._plan_proposed,
        MigrationProposed: Decider._proposed,
        CoresProposed: Decider._proposed,
        ThrottleProposed: Decider._proposed,
        ledger_events.TimerFired: Decider._fired,
    }
)
