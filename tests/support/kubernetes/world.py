"""A cell on Kubernetes in virtual time: the real placer core, reporters, a simulated API server and kubelets.

Everything between them is late, out of step, or lost, as a seed decides. `Judge` compares what really runs
with what the ledger holds.
"""

import heapq
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from penstock.ledger.check.check import check
from penstock.model.decisions.ledger_events import JobEnded, TermStarted, TimerFired
from penstock.model.decisions.orders import Order
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted, OrderRefused, TaskExited
from penstock.model.jobs.job_parts import Environment, ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.token import token_of
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock.model.schema.event import Event
from penstock_services.node_reporter.core.actions import Emit, Note
from penstock_services.node_reporter.kubernetes.core.messages import (
    Action,
    ConnectionRestored,
    CreatePod,
    DeletePod,
    End,
    FenceLost,
    FenceRaised,
    Input,
    Listed,
    OrderRead,
    RaiseFence,
    ReadPod,
    ReleasePod,
    Reported,
    Watched,
    Wrote,
)
from penstock_services.node_reporter.kubernetes.core.reporter import begin, step
from penstock_services.node_reporter.kubernetes.core.state import Options
from penstock_services.placer.core.orders import orders_of, outstanding
from penstock_services.placer.core.recorder import Recorder
from tests.support.kubernetes.kubelets import Kubelet
from tests.support.kubernetes.simulated_api import ApiError, ApiServer, Gone, node_of, pod_of

START_MS = 1_800_000_000_000
NAMESPACE = "penstock"
DEADLINE_MS = 3_000  # after which a request without an answer has an unknown result
CRASHED = 0.5  # part of the unsent events of a session that are sent when it ends


class World:
    """Virtual time, and everything in it. `odds`: probability that a request is lost, late or turned away."""

    def __init__(self, seed: int, *, fenced: bool = True, odds: float = 0.04, sizes: tuple[int, ...]) -> None:
        self.rng = Random(seed)
        self.now_ms = START_MS
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.odds = odds
        self.api = ApiServer(lambda: self.now_ms, fenced=fenced)
        self.kubelets = [
            Kubelet(self.api, self.schedule, self.rng, f"n{number}", gpus=gpus)
            for number, gpus in enumerate(sizes)
        ]
        self.story: list[str] = []
        self.orders: list[Order] = []
        self.sessions: list[Session] = []
        self.ended: dict[str, JobEnded] = {}
        self.problems: list[str] = []
        self.cell = Recorder()
        self._topic: list[Event] = []
        self._reading = False
        settings = PlacerSettings(unschedulable_grace_ms=3_600_000)
        self.take(TermStarted(term=1, placer_id="p1", settings=settings))

    # ------------------------------------------------------------------------------------------------- time

    def schedule(self, delay_ms: int, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._heap, (self.now_ms + max(0, delay_ms), self._number, what))

    def run(self, until: Callable[[], bool], at_most_ms: int) -> None:
        """Until the condition holds, or the time is over."""
        end_ms = self.now_ms + at_most_ms
        while self._heap and not until():
            if self._heap[0][0] > end_ms:
                break
            self.now_ms, _, what = heapq.heappop(self._heap)
            what()
            self.judge()
        if not until():
            self.now_ms = max(self.now_ms, end_ms)

    def chance(self, odds: float) -> bool:
        return self.rng.random() < odds

    def say(self, text: str) -> None:
        self.story.append(f"{(self.now_ms - START_MS) / 1_000:9.3f} {text}")

    # ----------------------------------------------------------------------------------------------- placer

    def append(self, event: Event) -> None:
        """To the nodes' topic; the placer reads it soon."""
        self._topic.append(event)
        if not self._reading:
            self._reading = True
            self.schedule(self.rng.randint(1, 40), self._read)

    def _read(self) -> None:
        self._reading = False
        events, self._topic = self._topic, []
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """One input of the placer, and the orders that follow."""
        self._fire()
        self._record(event)
        self._fire()

    def _fire(self) -> None:
        while (due := self.cell.state.next_timer()) is not None and due[0] <= self.now_ms:
            self._record(TimerFired(timer_id=due[1]))
        if due is not None:
            self.schedule(due[0] - self.now_ms, self._fire_if_due)

    def _fire_if_due(self) -> None:
        due = self.cell.state.next_timer()
        if due is not None and due[0] <= self.now_ms:
            self._fire()

    def _record(self, event: Event) -> None:
        found = self.cell.record(event, self.now_ms)
        self.say(f"placer {_short(event)} → {found.outcome} {found.reason or ''}")
        if (wrong := check(self.cell.state)) != []:
            self.problems.append(f"the ledger is inconsistent: {wrong}")
        token = token_of(self.cell.state.epoch, self.cell.head.seq)
        for fact in found.facts:
            if isinstance(fact, JobEnded):
                self.ended[fact.job_id] = fact
            self.orders += orders_of(self.cell.state, fact, token)
        for session in self.sessions:
            session.orders_soon()

    def repeat_orders(self) -> None:
        """A new placer repeats what is not answered."""
        state = self.cell.state
        self.orders += outstanding(state, list(state.nodes), token_of(state.epoch, self.cell.head.seq))
        for session in self.sessions:
            session.orders_soon()

    def submit(self, job_id: str, gpus: int, *, workers: int = 1, cores: int = 1) -> None:
        """A job of whole GPUs, in a container."""
        spec = JobSpec(
            command=("python", "train.py"),
            workers=workers,
            environment=Environment(container="registry/train:1"),
            resources=ResourceRequest(gpus=gpus, cores=cores, host_memory_mib=1_024),
            retry=RetryPolicy(max_attempts=50, backoff_ms=500),
            grace_ms=3_000,
        )
        need = ResourceVector(gpus=gpus, cores=cores, host_memory_mib=1_024, gpu_memory_mib=1_024)
        self.take(JobSubmitted(job_id=job_id, spec=spec))
        estimate = Estimate(worker=need, confidence=1.0, tier="user", source="a test")
        self.take(JobEstimated(job_id=job_id, estimate=estimate))

    def cancel(self, job_id: str) -> None:
        self.take(JobCancelRequested(job_id=job_id))

    # ---------------------------------------------------------------------------------------------- sessions

    def begin(self, **options: Any) -> "Session":
        """A reporter starts; earlier ones go on until they notice."""
        session = Session(
            self, f"r{len(self.sessions)}", Options(cluster="k", namespace=NAMESPACE, **options)
        )
        self.sessions.append(session)
        session.begin()
        return session

    # ------------------------------------------------------------------------------------------------- judge

    def judge(self) -> None:
        """What really runs is held in the ledger; nothing runs twice; no GPU is given twice."""
        running: dict[str, str] = {}
        for kubelet in self.kubelets:
            gpus: dict[str, str] = {}
            for pod in kubelet.running.values():
                found = pod["metadata"].get("annotations", {})
                task_id = found.get("penstock.dev/task")
                if pod["metadata"]["namespace"] != NAMESPACE or task_id is None:
                    continue
                self._held(task_id, int(found["penstock.dev/token"]), kubelet.name)
                if task_id in running:
                    self._wrong(f"{task_id} runs on {running[task_id]} and on {kubelet.name}")
                running[task_id] = kubelet.name
                for gpu in filter(None, found["penstock.dev/gpus"].split(",")):
                    if gpu in gpus:
                        self._wrong(f"{gpu}: {gpus[gpu]} and {task_id} at once")
                    gpus[gpu] = task_id

    def _held(self, task_id: str, token: int, node: str) -> None:
        job = self.cell.state.jobs.get(task_id.rsplit(".", 2)[0])
        held = self.cell.state.nodes.get(f"k/{node}")
        if job is None or held is None or task_id not in held.tasks or job.token != token:
            self._wrong(f"{task_id} (token {token}) runs on {node}, and the ledger does not hold its place")

    def _wrong(self, text: str) -> None:
        if text not in self.problems:
            self.say(f"!! {text}")
            self.problems.append(text)


def _short(event: Event) -> str:
    fields = ("job_id", "task_id", "node_id", "token", "cause", "reason", "detail", "incarnation", "timer_id")
    about = [f"{name}={getattr(event, name)}" for name in fields if getattr(event, name, None)]
    return f"{event.TYPE.removeprefix('penstock.')} {event.subject()} {' '.join(about)}"


class Session:
    """The shell of one reporter: carries out actions, feeds inputs. `dead`: it was killed."""

    def __init__(self, world: World, name: str, options: Options) -> None:
        self.world, self.name, self.options = world, name, options
        self.dead = False
        self.crash_odds = 0.0
        self.versions: dict[str, int] = {}
        self._unsent: list[tuple[int, Event]] = []
        self._position = -1
        self._due: set[str] = set()
        self.state, self._first = begin(options)
        world.api.listeners.append(self._watch_soon)

    def begin(self) -> None:
        self.world.say(f"{self.name} begins")
        self.act(self._first)

    @property
    def live(self) -> bool:
        return not self.dead and not self.state.over

    def crash(self) -> None:
        """kill -9: requests under way arrive; of unsent events the first few do."""
        if self.live:
            self.world.say(f"{self.name} is killed")
        self.dead = True
        kept = self.world.rng.randint(0, len(self._unsent))
        unsent, self._unsent = self._unsent, []
        for _, event in unsent[:kept]:
            self.world.append(event)

    def feed(self, *given: Input) -> None:
        """As the shell: the watch events of a burst together."""
        if not self.live:
            return
        actions = step(self.state, *given)
        if self.world.chance(self.crash_odds):
            self.act(actions[: self.world.rng.randint(0, len(actions))])
            self.crash()
        else:
            self.act(actions)

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Emit(event=event):
                    self._send(event)
                case Note(text=text):
                    self.world.say(f"{self.name} notes {text}")
                case RaiseFence():
                    self._later(partial(self._raise, action))
                case End(why=why):
                    self.world.say(f"{self.name} ends: {why}")
                    self._unsent.clear()
                case _:
                    self._write(action)

    # ------------------------------------------------------------------------------------------------ outbox

    def _send(self, event: Event) -> None:
        last_ms = self._unsent[-1][0] if self._unsent else 0
        at_ms = max(last_ms, self.world.now_ms + self.world.rng.randint(1, 60))
        self._unsent.append((at_ms, event))
        self.world.schedule(at_ms - self.world.now_ms, self._flush)

    def _flush(self) -> None:
        while self._unsent and self._unsent[0][0] <= self.world.now_ms:
            _, event = self._unsent.pop(0)
            self.world.append(event)
            if isinstance(event, TaskExited | OrderRefused):
                self._later(partial(self._reported, event.task_id, event.token))

    def restored(self) -> None:
        """The API server answers again."""
        self.feed(ConnectionRestored(self.world.now_ms))

    def _reported(self, task_id: str, token: int) -> None:
        self.feed(Reported(task_id, token, self.world.now_ms))

    # ------------------------------------------------------------------------------------------------- reads

    def _raise(self, action: RaiseFence) -> None:
        world = self.world
        try:
            term = world.api.raise_fence(action.above, action.own)
        except ApiError:
            self._later(lambda: self.feed(FenceLost(world.api.term, world.now_ms)))
            return
        world.schedule(world.rng.randint(0, 3_000), lambda: self._admit(term))
        self._later(lambda: self._raised(term))

    def _admit(self, term: int) -> None:
        self.world.api.admitted_term = max(self.world.api.admitted_term, term)

    def _raised(self, term: int) -> None:
        self._position = len(self.world.orders) if self._position < 0 else self._position
        self.feed(FenceRaised(term, self.world.now_ms))
        if not self.versions:
            for kind in ("nodes", "pods"):
                self.list(kind)

    def list(self, kind: str) -> None:
        """A list now, or after a gap in the watch."""
        if not self.live:
            return
        found, version = self.world.api.read(kind)
        decode: Any = pod_of if kind == "pods" else node_of
        self._due.add(kind)

        def listed() -> None:
            self._due.discard(kind)
            self.versions[kind] = version
            what: Any = kind
            self.feed(Listed(tuple(map(decode, found)), what, self.world.now_ms))
            self._watch_soon()

        self._later(listed)

    def _watch_soon(self) -> None:
        for kind in self.versions:
            if kind not in self._due and self.live:
                self._due.add(kind)
                self._later(partial(self._watch, kind))

    def _watch(self, kind: str) -> None:
        self._due.discard(kind)
        if not self.live:
            return
        if self.world.chance(self.world.odds / 20):
            self.world.say(f"{self.name}: watch of {kind} broke")
            self._due.add(kind)
            self.world.schedule(self.world.rng.randint(10, 3_000), lambda: self._break(kind))
            return
        try:
            changes = list(self.world.api.since(kind, self.versions[kind]))
        except Gone:
            self.list(kind)
            return
        decode: Any = pod_of if kind == "pods" else node_of
        burst: list[Input] = []
        for version, change, found in changes:
            self.versions[kind] = version
            what: Any = change
            burst.append(Watched(what, decode(found), self.world.now_ms))
        self.feed(*burst)

    def _break(self, kind: str) -> None:
        self._due.discard(kind)
        self.list(kind)

    def orders_soon(self) -> None:
        if "orders" not in self._due and self.live and self._position >= 0:
            self._due.add("orders")
            self._later(self._read_orders)

    def _read_orders(self) -> None:
        self._due.discard("orders")
        while self.live and self._position < len(self.world.orders):
            order = self.world.orders[self._position]
            self._position += 1
            self.world.say(f"{self.name} reads {_short(order)}")
            self.feed(OrderRead(order, self.world.now_ms))

    # ------------------------------------------------------------------------------------------------ writes

    def _write(self, write: CreatePod | ReadPod | DeletePod | ReleasePod) -> None:
        """A request may be lost on its way, be late, be turned away, or its answer may be lost."""
        world, rng = self.world, self.world.rng
        wait_ms = max(0, write.not_before_ms - world.now_ms)
        late = world.chance(world.odds)
        sent_ms = wait_ms + (rng.randint(2_000, 30_000) if late else rng.randint(1, 50))
        answered: list[bool] = []

        def arrives() -> None:
            if world.chance(world.odds):
                return
            if world.chance(world.odds):
                answer = Wrote(write=write, outcome="busy", retry_ms=rng.randint(500, 3_000), now_ms=0)
            else:
                answer = self._result(write)
            world.say(f"{self.name} {type(write).__name__} {write.name}: {answer.outcome} {answer.text}")
            if not world.chance(world.odds):
                world.schedule(rng.randint(1, 50), lambda: answers(answer))

        def answers(answer: Wrote) -> None:
            if not answered:
                answered.append(True)
                self.feed(
                    Wrote(
                        write=write,
                        outcome=answer.outcome,
                        pod=answer.pod,
                        text=answer.text,
                        retry_ms=answer.retry_ms,
                        now_ms=world.now_ms,
                    )
                )

        def sends() -> None:  # what a killed reporter has not sent is never sent
            if wait_ms == 0 or self.live:
                world.schedule(sent_ms - wait_ms, arrives)
                world.schedule(DEADLINE_MS, lambda: answers(Wrote(write=write, outcome="unknown", now_ms=0)))

        world.schedule(wait_ms, sends) if wait_ms else sends()

    def _result(self, write: CreatePod | ReadPod | DeletePod | ReleasePod) -> Wrote:
        api, key = self.world.api, f"{write.namespace}/{write.name}"
        try:
            match write:
                case CreatePod(manifest=manifest):
                    return Wrote(write=write, outcome="done", pod=pod_of(api.create(manifest)), now_ms=0)
                case ReadPod():
                    return Wrote(write=write, outcome="done", pod=pod_of(api.get(key)), now_ms=0)
                case DeletePod(uid=uid, grace_s=grace_s):
                    api.delete(key, uid, grace_s)
                case ReleasePod(uid=uid, resource_version=version, finalizers=finalizers):
                    api.release(key, uid, version, finalizers)
        except ApiError as error:
            text = str(error)
            if error.code == 409:
                present = isinstance(write, CreatePod) and key in api.pods
                pod = pod_of(api.get(key)) if present else None
                return Wrote(write=write, outcome="conflict", pod=pod, text=text, now_ms=0)
            if error.code == 404:
                return Wrote(write=write, outcome="absent", text=text, now_ms=0)
            fenced = text.startswith("penstock-term")
            return Wrote(write=write, outcome="fenced" if fenced else "refused", text=text, now_ms=0)
        return Wrote(write=write, outcome="done", now_ms=0)

    def _later(self, what: Callable[[], None]) -> None:
        self.world.schedule(self.world.rng.randint(1, 40), what)
