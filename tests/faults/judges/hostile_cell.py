"""A random cell in which services err and die, nodes refuse, vanish and come back changed, and senders
lie."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from msgspec.structs import replace

from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.adjustments import (
    ADJUSTED_FOR_MS,
    RENEWED_AFTER_MS,
    BandwidthDecided,
    CoresDecided,
    TaskAdjusted,
)
from penstock.model.decisions.ledger_events import TimerSet, TimerSubject
from penstock.model.decisions.orders import ProbeNode
from penstock.model.inputs.external_events import (
    GpuFaulted,
    JobCancelRequested,
    NodeJoined,
    NodeLeft,
    OrderRefused,
    RunningTask,
    TaskExited,
    TaskStarted,
)
from penstock.model.nouns.nodes import Isolation, NodeSpec
from penstock.model.nouns.settings import Contention, PlacerSettings
from penstock.model.nouns.transitions import JobStatus, NodeStatus, TaskStatus
from penstock.model.nouns.types import MAX_MS
from penstock.model.proposals import CoresProposed, PlanProposed, ProposedJob, ProposedUnit, ThrottleProposed
from penstock.model.schema.event import Event
from penstock.scheduling.acting.guard import PROPOSER
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.orders import notices_of, orders_of
from penstock_services.placer.core.step import Step
from tests.faults.judges.cell_rules import Broken, CellRules
from tests.faults.laboratory.injection.policies import raising_policies
from tests.faults.laboratory.patching import posing
from tests.support.cluster.driver import eta, node_spec
from tests.support.cluster.random_cell import DISTURBED, QUIET, RandomCell

MOST_STEPS = 20_000
HOSTILE_STEPS = 120
"""So long all of it goes on; then what is taken out of use comes back, but for the dead."""
PROPOSED, FORGED, PLANNED = 0.12, 0.08, 0.04
"""Rates per step until then."""
LONG_MS = 5 * ADJUSTED_FOR_MS
BURST = 120
"""Proposals of a service that errs, about one task: more than it may make."""
FAILS = 0.05
"""Rate at which a policy with a bug raises, and at which its answer is beyond all bounds."""


def settings_of(seed: int, profile: str) -> PlacerSettings:
    """Of this profile, with what else differs between cells."""
    rng = np.random.default_rng((seed, 7))
    return PlacerSettings(
        profile=profile,
        backfill_window=int(rng.choice([8, 64])),
        max_overtakes=int(rng.choice([4, 256])),
        batch_window_ms=int(rng.choice([0, 0, 5_000])),
        batch_arrivals=3,
        contention=Contention() if rng.random() < 0.5 else None,
        share_gpus=str(rng.choice(["never", "fits", "learned"])),  # type: ignore[arg-type]
        unschedulable_grace_ms=int(rng.choice([1_000, 300_000])),
    )


class HostileCell(RandomCell):
    """`rules` judge its records. `buggy`: its policy raises now and then."""

    def __init__(
        self, seed: int, settings: PlacerSettings, jobs: int, *, buggy: bool, fresh_every: int = 0
    ) -> None:
        self.rules = CellRules()
        self.reader = Replica()
        self.offset = 0
        self.leased = seed % 4 != 3
        """Whether reporters keep leases."""
        self.incarnations: dict[str, int] = {}
        self.dead: set[str] = set()
        """Nodes that never come back."""
        self.spoken: list[GpuFaulted] = []
        self.notices: list[Event] = []
        self.buggy = False
        self.count = self.steps = 0
        super().__init__(seed, settings, jobs, fresh_every=0 if buggy else fresh_every)
        self.buggy, self._stops_at_bugs = buggy, not buggy

    # -------------------------------------------------------------------------------- what is written

    def written(self, value: bytes) -> None:
        if self.reader.take(value, self.offset) is None:
            raise Broken(f"chain: record {self.offset} is void")
        self.offset += 1

    def feed(self, event: Event) -> Step:
        if isinstance(event, GpuFaulted) and not event.incarnation:
            event = replace(event, incarnation=self.incarnations[event.node_id])
            self.spoken.append(event)
        step = super().feed(event)
        facts = list(step.facts)
        self.rules.record(self.state, event, facts)
        for fact in facts:
            orders = orders_of(self.state, fact, self.head.seq)
            self.notices += notices_of(self.state, fact, orders)
            self.notices += [answer for order in orders for answer in self._answers(order, fact)]
        return step

    def _answers(self, order: Any, fact: Event) -> Iterator[Event]:
        """What a node that lives reports, or a silent one, if it was silent for a moment only."""
        if order.node_id in self.dead:
            return
        if isinstance(order, ProbeNode):
            if self.rng.random() < 0.5 and not self.dead and len(self.state.nodes) > 1:
                self.dead.add(order.node_id)
            else:
                yield self._joining(self.state.nodes[order.node_id].spec)
        elif isinstance(fact, CoresDecided | BandwidthDecided):
            cores = isinstance(fact, CoresDecided)
            cap = self.state.nodes[order.node_id].spec.bandwidth_cap
            yield TaskAdjusted(
                node_id=order.node_id,
                task_id=order.task_id,
                token=self.state.jobs[fact.job_id].token,
                order_token=order.token,
                what="cores" if cores else "memory_bandwidth",
                enforced="cpuset" if cores else "" if cap == "none" else cap,
            )

    def _deliver(self) -> None:
        while self.notices:
            found = self.notices.pop(0)
            if isinstance(found, NodeJoined):
                self._joins_again(found.node.node_id)
            else:
                self.feed(found)

    # ------------------------------------------------------------------------------------- nodes

    def _joining(self, spec: NodeSpec) -> NodeJoined:
        known = self.incarnations.get(spec.node_id, 0) + 1
        self.incarnations[spec.node_id] = known
        if spec.machine_id is None:
            caps = Isolation(exits="pid_namespace", files=True, bandwidth="resctrl")
            spec = replace(spec, machine_id=f"machine of {spec.node_id}".replace(" ", "-"), isolation=caps)
        return NodeJoined(node=spec, incarnation=known, leases=self.leased)

    def _joins_again(self, node_id: str) -> None:
        """With its tasks, and perhaps with other GPUs, in another order."""
        node = self.state.nodes[node_id]
        gpus = list(node.spec.gpus)
        if self.rng.random() < 0.3 and len(gpus) > 1:
            gpus.pop(int(self.rng.integers(len(gpus))))
        if self.rng.random() < 0.3:
            gpus = [gpus[int(at)] for at in self.rng.permutation(len(gpus))]
        spec = replace(node.spec, gpus=tuple(replace(gpu, index=n) for n, gpu in enumerate(gpus)))
        tasks = [
            RunningTask(task_id=task_id, token=self.state.jobs[job_id].token)
            for task_id, job_id in node.tasks.items()
            if self.state.jobs[job_id].tasks[task_id].started_ms is not None
        ]
        self.feed(replace(self._joining(spec), tasks=tuple(tasks)))

    def _undisturb(self) -> None:
        if self.steps >= HOSTILE_STEPS:
            self.silent -= self.dead
            super()._undisturb()

    def _acts(self) -> Iterator[Event]:
        """Nodes refuse some starts, and all of some jobs; some jobs fail; the dead report nothing."""
        for event in super()._acts():
            job_id, _, _ = event.task_id.rpartition(".")[0].partition(".")  # type: ignore[attr-defined]
            number = int(job_id[1:])
            if event.node_id in self.dead:  # type: ignore[attr-defined]
                continue
            if isinstance(event, TaskExited) and event.cause == "exited" and self._runs_on(job_id):
                continue
            if isinstance(event, TaskStarted) and number % 13 == 5:
                yield OrderRefused(
                    node_id=event.node_id,
                    task_id=event.task_id,
                    token=event.token,
                    reason="occupied",
                    highest_token=event.token,
                )
            elif isinstance(event, TaskExited) and event.exit_code == 0 and number % 17 == 3:
                yield replace(event, exit_code=1)
            else:
                yield event

    def _runs_on(self, job_id: str) -> bool:
        """Every seventh job runs for long, and every one without GPUs."""
        job = self.state.jobs[job_id]
        runs = job.running_ms is not None and self.now_ms < job.running_ms + LONG_MS
        return runs and (int(job_id[1:]) % 7 == 1 or not job.demand.worker.gpus)

    # ------------------------------------------------------------------------------------- each step

    def run(self) -> list[str]:
        quiet = 0
        with self._bugs():
            while quiet < QUIET and self._step():
                self.steps += 1
                if self.steps > MOST_STEPS:
                    raise Broken("waits: it goes on for ever")
                goes_on = self.submitted < self.jobs or self.state.holding or self.steps < HOSTILE_STEPS
                quiet = 0 if goes_on else quiet + 1
        self.rules.end(self.state)
        if dump(self.reader.state) != dump(self.state):
            raise Broken("fold: a reader has another state than the placer")
        return []

    def _step(self) -> bool:
        if self.steps < HOSTILE_STEPS:
            self._hostile()
        self._deliver()
        found = super()._step() or bool(self.notices) or self._wait_for_long_jobs()
        self._deliver()
        if self.steps % 3 == 0:
            self._look()
        return found or self.steps <= HOSTILE_STEPS

    def _look(self) -> None:
        while (due := self.state.next_timer()) is not None and due[0] <= self.now_ms:
            self._fire()
            self._deliver()
        self.rules.look(self.state, self.now_ms)
        if not (self.state.holding or self.state.queue or self.state.frozen or self.state.in_window):
            self.rules.alarm(self.state, self.now_ms)

    def _wait_for_long_jobs(self) -> bool:
        """Nothing happens before the next of them ends; False: none runs."""
        ends = [job.running_ms + LONG_MS for job in self.state.holding.values() if job.running_ms is not None]
        if not ends or min(ends) <= self.now_ms:
            return False
        self.now_ms = min(ends)
        self._look()
        return True

    def _hostile(self) -> None:
        """A service proposes, perhaps too much; somebody says what is not true, or not for that sender to
        say."""
        if self.submitted == self.jobs and self.rng.random() < 2 * DISTURBED:
            self._disturb()
        if self.rng.random() < PROPOSED:
            self._proposes(BURST if self.rng.random() < 0.1 else 1)
        if self.rng.random() < (0.3 if self.state.in_window else PLANNED):
            self._plans()
        if self.rng.random() < FORGED:
            self._forges()
        if self.state.unschedulable and self.rng.random() < 0.1 and "big" not in self.state.nodes:
            self.feed(self._joining(node_spec("big", 8, cores=64)))

    def _some(self, jobs: list[JobState]) -> JobState | None:
        return jobs[int(self.rng.integers(len(jobs)))] if jobs else None

    # ------------------------------------------------------------------------------------- proposals

    def _proposes(self, times: int) -> None:
        running = [job for job in self.state.holding.values() if job.status is JobStatus.RUNNING]
        without = [job for job in running if not job.demand.worker.gpus]
        job = self._some(without if without and self.rng.random() < 0.7 else running)
        if job is None:
            return
        task_id = next(iter(job.tasks))
        for _ in range(times):
            task = job.tasks.get(task_id)
            if task is None or task.status is not TaskStatus.RUNNING:
                return
            self.count += 1
            by = "ada" if times == 1 and self.rng.random() < 0.15 else ""
            cause = "" if by else str(self.rng.choice(["contention"] * 4 + ["probe", "released", "other"]))
            about: dict[str, Any] = {
                "proposal_id": f"p{self.count}",
                "proposer": "gateway" if by else PROPOSER,
                "task_id": task_id,
                "by": by,
                "cause": cause,
                "reason": "it was measured",
            }
            used, most = len(task.used_cores), max(task.cores.placed, task.cores.throttled_from)
            if cause == "released" and used < most:
                self.feed(CoresProposed(**about, cores=int(self.rng.integers(used, most + 1))))
            elif self.rng.random() < 0.5:
                cores = int(self.rng.integers(1, max(used, most + 2 if times == 1 else 2)))
                self.feed(CoresProposed(**about, cores=cores))
            else:
                percent = int(self.rng.integers(10, 90))
                self.feed(ThrottleProposed(**about, memory_bandwidth_percent=percent))
            self._deliver()
        if times > 1:
            self._renews(job, task_id)

    def _renews(self, job: JobState, task_id: str) -> None:
        """The same throttle once more, when it is old: it lasts on, and is counted once."""
        self.now_ms += RENEWED_AFTER_MS
        while (due := self.state.next_timer()) is not None and due[0] <= self.now_ms:
            self._fire()
        task = job.tasks.get(task_id)
        if task is None or task.status is not TaskStatus.RUNNING or job.succession.followed:
            return
        adjusted, percent = task.bandwidth_adjusted, task.memory_bandwidth_percent
        node = self.state.nodes[task.place.node_id]
        if adjusted is None or adjusted.by != PROPOSER or percent is None or self.state.frozen:
            return
        if node.status is not NodeStatus.READY or job.demand.worker.gpus:
            return
        self.count += 1
        step = self.feed(
            ThrottleProposed(
                proposal_id=f"p{self.count}",
                proposer=PROPOSER,
                task_id=task_id,
                cause="contention",
                reason="it is still needed",
                memory_bandwidth_percent=percent,
            )
        )
        if not any(isinstance(fact, BandwidthDecided | TimerSet) for fact in step.facts):
            raise Broken(f"temporary: the throttle of {task_id} is not renewed: {step.facts[-1]}")

    def _plans(self) -> None:
        """Some waiting jobs on some nodes, until some time."""
        waiting = [self.state.jobs[job_id] for job_id in list(self.state.queue.values())[:30]]
        units = []
        for _ in range(int(self.rng.integers(1, 4))):
            job = self._some([job for job in waiting if job.estimate is not None])
            if job is None:
                return
            waiting.remove(job)
            nodes = [str(self.rng.choice(sorted(self.state.nodes))) for _ in range(job.demand.tasks)]
            units.append(
                ProposedUnit(jobs=(ProposedJob(job_id=job.job_id, nodes=tuple(nodes)),), explanation="so")
            )
        self.count += 1
        until_ms = self.now_ms + 60_000 if self.rng.random() < 0.5 else None
        self.feed(
            PlanProposed(
                proposal_id=f"p{self.count}", proposer="batcher", units=tuple(units), valid_until_ms=until_ms
            )
        )

    # ------------------------------------------------------------------------------------- lies

    def _forges(self) -> None:
        """One of them; none may become a fact."""
        lies: list[Callable[[], Event | None]] = [
            self._fault_of_yesterday,
            self._leaves_again,
            self._time_left_of_before,
            self._of_another_node,
            self._cancel_of_a_stranger,
            self._same_name,
            self._same_gpu,
        ]
        lie = lies[int(self.rng.integers(len(lies)))]()
        if lie is None:
            return
        step = self.feed(lie)
        if any(type(fact) is type(lie) for fact in step.facts):
            raise Broken(f"speaks: {lie} counts")

    def _fault_of_yesterday(self) -> Event | None:
        return next((one for one in self.spoken if one.incarnation < self.incarnations[one.node_id]), None)

    def _leaves_again(self) -> Event | None:
        for node_id, node in self.state.nodes.items():
            if self.incarnations[node_id] > 1 and node.status is NodeStatus.READY:
                before = self.incarnations[node_id] - 1
                return NodeLeft(
                    node_id=node_id, boot_id=node.spec.boot_id, proof="shutdown", incarnation=before
                )
        return None

    def _time_left_of_before(self) -> Event | None:
        job = self._some([job for job in self.state.holding.values() if job.attempt > 1])
        return None if job is None else eta(job.job_id, self.now_ms, 5e3, job.attempt - 1)

    def _of_another_node(self) -> Event | None:
        job = self._some(list(self.state.holding.values()))
        if job is None:
            return None
        task = next(iter(job.tasks.values()))
        others = sorted(self.state.nodes.keys() - {task.place.node_id})
        return (
            None
            if not others
            else TaskExited(
                node_id=others[0],
                task_id=task.place.task_id,
                token=job.token,
                cause="exited",
                exit_code=0,
                started_ms=self.now_ms,
                exited_ms=self.now_ms,
            )
        )

    def _cancel_of_a_stranger(self) -> Event | None:
        job = self._some(list(self.state.jobs.values()))
        return None if job is None else JobCancelRequested(job_id=job.job_id, tenant="stranger")

    def _same_name(self) -> Event | None:
        for node in self.state.nodes.values():
            if node.status is NodeStatus.READY:
                spec = replace(node.spec, machine_id="another", boot_id="another")
                return NodeJoined(
                    node=spec, incarnation=self.incarnations[spec.node_id] + 1, leases=self.leased
                )
        return None

    def _same_gpu(self) -> Event | None:
        for node in self.state.nodes.values():
            if node.status is not NodeStatus.GONE:
                return NodeJoined(node=replace(node.spec, node_id="copy", machine_id="copy"), incarnation=1)
        return None

    # ------------------------------------------------------------------------------------- bugs

    @contextmanager
    def _bugs(self) -> Iterator[None]:
        """Answers of the policy that are exceptions, or times that no reader could decode."""
        if not self.buggy:
            yield
            return
        real = Decider.decide

        def decide(decider: Decider, state: Any, event: Event, *rest: Any) -> Iterator[Event]:
            yield from real(decider, state, event, *rest)
            if happens(FAILS):
                about = TimerSubject(kind="ending", id="cell", attempt=0)
                yield TimerSet(timer_id="cell:ending", at_ms=MAX_MS + 1, about=about)

        def happens(rate: float) -> bool:
            return self.steps < HOSTILE_STEPS and bool(self.rng.random() < rate)

        chance = SimpleNamespace(rates=SimpleNamespace(policy=FAILS), happens=happens)
        with raising_policies(chance), posing(Decider, "decide", decide):  # type: ignore[arg-type]
            self.core.decider.failed(RuntimeError("its profile is made anew"))
            yield
