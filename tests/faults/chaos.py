"""A cell in one process and in virtual time, over a log that misbehaves as its contract allows.

Two placers fight for the office, nodes crash and repeat themselves, every append may fail before the write,
after it, in the middle of it, or land later than its failure was told. Hundreds of such lives fit into a test.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from penstock.clock import wall_ms
from penstock.errors import AppendFailed, LogError
from penstock.log.memory import MemoryBroker, MemoryLog
from penstock.log.port import MAX_READ_RECORDS, Log, Message, Partition, Reader, Record
from penstock.model.envelope import Envelope, from_wire, to_wire
from penstock.model.event import Event
from penstock.model.external_events import (
    JobCancelRequested,
    JobSubmitted,
    NodeJoined,
    OrderRefused,
    TaskExited,
    TaskStarted,
)
from penstock.model.ledger_events import StartTask, StopTask
from penstock.model.topics import Topic, node_partition
from penstock.model.types import Gpu, JobSpec, NodeSpec, ResourceRequest, RetryPolicy
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell import service as estimator
from penstock_services.placer.shell import service as placer
from tests.faults.fault_cell import EITHER, FAILED, SUCCEEDED, TOPICS, Follower
from tests.faults.judge import Verdict, judge_histories, judge_log

PATIENCE_S = 900.0  # of virtual time, until everything has come to rest
RETRY_S = 0.02
SETTINGS = Settings(log_url="memory", trace_ratio=0.0)
GPUS = 2


@dataclass(slots=True)
class Weather:
    """How bad it is. Probabilities per append or read; times in s."""

    rng: np.random.Generator
    failing: float = 0.08
    slow: float = 0.05
    longest_pause_s: float = 3.0
    """Longer than a standing-by placer's patience: who sleeps so long wakes up as a zombie."""
    calm: bool = False

    def chance(self, probability: float) -> bool:
        return not self.calm and bool(self.rng.random() < probability)

    def pause_s(self) -> float:
        if self.chance(self.slow):
            return float(self.rng.uniform(0, self.longest_pause_s))
        return float(self.rng.uniform(0, 0.004))


class ChaosReader:
    """A reader that is sometimes slow to wake up."""

    def __init__(self, inner: Reader, weather: Weather) -> None:
        self._inner = inner
        self._weather = weather

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        few = int(self._weather.rng.integers(1, 8)) if self._weather.chance(0.3) else max_records
        await asyncio.sleep(self._weather.pause_s())
        return await self._inner.read(max_records=few, timeout_ms=timeout_ms)

    def position(self, partition: Partition) -> int:
        return self._inner.position(partition)

    async def close(self) -> None:
        await self._inner.close()


class ChaosLog:
    """`MemoryLog` in bad weather."""

    def __init__(self, broker: MemoryBroker, weather: Weather, identity: str) -> None:
        self._inner = MemoryLog(broker, identity)
        self._weather = weather
        self._late: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        return self

    async def create(self, topics: Mapping[str, int]) -> None:
        await self._inner.create(topics)

    async def append(self, messages: Sequence[Message]) -> list[int]:
        weather = self._weather
        await asyncio.sleep(weather.pause_s())
        if not weather.chance(weather.failing):
            return await self._inner.append(messages)
        how = int(weather.rng.integers(0, 4))
        if how == 1:
            await self._inner.append(messages)
        elif how == 2:
            await self._inner.append(messages[: int(weather.rng.integers(0, len(messages) + 1))])
        elif how == 3:
            late = asyncio.ensure_future(self._later(list(messages), float(weather.rng.uniform(0, 0.2))))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        raise AppendFailed(f"chaos {how}")

    async def _later(self, messages: list[Message], pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        await self._inner.append(messages)

    def reader(self, start: Mapping[Partition, int], *, pace_ms: int = 0) -> Reader:
        return ChaosReader(self._inner.reader(start, pace_ms=pace_ms), self._weather)

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        return await self._inner.end_offsets(partitions)

    async def close(self) -> None:
        await self._inner.close()


async def insist(log: Log, message: Message) -> None:
    """Sends until it is acknowledged."""
    while True:
        try:
            await log.append([message])
        except LogError:
            await asyncio.sleep(RETRY_S)
        else:
            return


class ChaosNode:
    """A node whose tasks are only timers; it keeps the same history as a judge, and obeys as blindly."""

    def __init__(self, name: str, log: Log, weather: Weather) -> None:
        self.name = name
        self.history: list[dict[str, Any]] = []
        self._log = log
        self._weather = weather
        self._boots = 0
        self._highest: dict[int, int] = {}
        self._running: dict[tuple[str, int], tuple[StartTask, asyncio.TimerHandle]] = {}
        self._answers: dict[tuple[str, int], Event] = {}
        self._said: list[Message] = []
        self._never: dict[str, int] = {}
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    async def live(self) -> None:
        """For ever; crashes now and then while the weather is bad."""
        place = Partition(Topic.ORDERS, node_partition(self.name))
        reader = self._log.reader({place: 0})
        self._boot()
        sending = asyncio.ensure_future(self._send())
        try:
            while True:
                for record in await reader.read(timeout_ms=500):
                    self._obey(record)
                if self._weather.chance(0.01):
                    self._crash()
                if self._said and self._weather.chance(0.05):  # an old message comes once more, late
                    self._outbox.put_nowait(self._said[int(self._weather.rng.integers(len(self._said)))])
        finally:
            sending.cancel()

    async def _send(self) -> None:
        while True:
            await insist(self._log, await self._outbox.get())

    def _say(self, event: Event, number: object) -> None:
        headers, value = to_wire(Envelope(f"{self.name}/{number}", f"/chaos/{self.name}", wall_ms(), event))
        message = Message(Partition(Topic.NODES, 0), value, headers)
        self._said.append(message)
        self._outbox.put_nowait(message)

    def _boot(self) -> None:
        self._boots += 1
        gpus = tuple(Gpu(index=i, uuid=f"{self.name}-{i}", model="chaos", memory_mib=1_024) for i in range(GPUS))  # fmt: skip
        spec = NodeSpec(
            node_id=self.name, boot_id=f"boot-{self._boots}", cores=8, host_memory_mib=65_536, gpus=gpus
        )
        self._say(NodeJoined(node=spec, incarnation=self._boots), f"boot-{self._boots}")

    def _crash(self) -> None:
        for order, timer in self._running.values():
            timer.cancel()
            self._write("died", order)
        self._running.clear()
        self._boot()

    def _write(self, kind: str, order: StartTask, **more: object) -> None:
        self.history.append(
            {
                "at_ns": int(self._loop.time() * 1e9), "kind": kind, "node": self.name, "job": order.job_id,
                "gpus": list(order.place.gpus), "attempt": order.attempt, "task": order.task_id, "token": order.token, **more,
            }
        )  # fmt: skip

    def _obey(self, record: Record) -> None:
        order = from_wire(record.headers, record.value, Topic.ORDERS).data
        if getattr(order, "node_id", None) != self.name:
            return
        if isinstance(order, StopTask):
            self._stop(order)
        elif isinstance(order, StartTask) and order.boot_id == f"boot-{self._boots}":
            self._start(order)

    def _start(self, order: StartTask) -> None:
        key = (order.task_id, order.token)
        if key in self._answers:
            self._say(self._answers[key], f"again-{key}-{len(self._said)}")
            return
        if key not in self._running:
            highest = max(*(self._highest.get(gpu, 0) for gpu in order.place.gpus), self._never.get(order.task_id, 0))  # fmt: skip
            if order.token < highest:
                self._refuse(order.task_id, order.token, highest)
                return
            self._highest.update(dict.fromkeys(order.place.gpus, order.token))
            seconds = float(order.command[1])
            timer = self._loop.call_later(seconds, self._exit, order, int(order.command[2]))
            self._running[key] = (order, timer)
            self._write("start", order)
        event = TaskStarted(node_id=self.name, task_id=order.task_id, token=order.token, pid=1, started_ms=1)
        self._say(event, f"started-{key}")

    def _refuse(self, task_id: str, token: int, highest: int) -> None:
        event = OrderRefused(
            node_id=self.name, task_id=task_id, token=token, reason="stale_token", highest_token=highest
        )
        self._say(event, f"refused-{task_id}-{token}")

    def _exit(self, order: StartTask, code: int, *, stopped: bool = False) -> None:
        key = (order.task_id, order.token)
        _, timer = self._running.pop(key)
        timer.cancel()
        self._write("exit", order, code=None if stopped else code)
        self._answers[key] = TaskExited(
            node_id=self.name, task_id=order.task_id, token=order.token,
            cause="stopped" if stopped else "exited", exit_code=None if stopped else code,
            signal=9 if stopped else None, started_ms=1, exited_ms=2,
        )  # fmt: skip
        self._say(self._answers[key], f"exited-{key}")

    def _stop(self, order: StopTask) -> None:
        for running, _ in list(self._running.values()):
            if running.task_id == order.task_id:
                self._exit(running, 0, stopped=True)
                return
        for (task_id, _), answer in self._answers.items():
            if task_id == order.task_id:
                self._say(answer, f"again-{task_id}-{len(self._said)}")
                return
        self._never[order.task_id] = order.token
        self._refuse(order.task_id, order.token, order.token)


class ChaosCell:
    """One life: `await ChaosCell(seed).live()` returns the verdict."""

    def __init__(self, seed: int, *, placers: int = 2, nodes: int = 3, jobs: int = 14) -> None:
        self.rng = np.random.default_rng(seed)
        self.weather = Weather(self.rng, failing=float(self.rng.uniform(0, 0.2)), slow=float(self.rng.uniform(0, 0.1)))  # fmt: skip
        self.broker = MemoryBroker()
        self.broker.create(TOPICS)
        self.acknowledged: dict[str, frozenset[str]] = {}
        self._placers = placers
        self._nodes = nodes
        self._jobs = jobs

    def log(self, identity: str) -> ChaosLog:
        return ChaosLog(self.broker, self.weather, identity)

    async def live(self) -> Verdict:
        stop = asyncio.Event()
        quiet = MemoryLog(self.broker, "test")
        follower = Follower(quiet)
        nodes = [ChaosNode(f"n{i}", self.log(f"n{i}"), self.weather) for i in range(self._nodes)]
        tasks = [
            *(asyncio.ensure_future(placer.run(SETTINGS, stop, log=self.log(f"p{i}"))) for i in range(self._placers)),
            asyncio.ensure_future(estimator.run(SETTINGS, stop, log=self.log("estimator"))),
            *(asyncio.ensure_future(node.live()) for node in nodes),
            asyncio.ensure_future(follower.run()),
        ]  # fmt: skip
        try:
            await self._submit()
            self.weather.calm = True
            await self._rest(follower, tasks)
        finally:
            stop.set()
            for task in tasks[self._placers + 1 :]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        verdict = Verdict()
        good = judge_histories(verdict, [node.history for node in nodes])
        await judge_log(verdict, quiet, self.acknowledged, good, exact_letters=False)
        return verdict

    async def _submit(self) -> None:
        log = self.log("users")
        for number in range(self._jobs):
            job_id, kind = f"job-{number}", float(self.rng.random())
            code = "1" if kind > 0.85 else "0"
            spec = JobSpec(
                command=("work", f"{self.rng.uniform(0.01, 1.0):.3f}", code),
                workers=int(self.rng.integers(1, 4)),
                resources=ResourceRequest(gpus=1, cores=1, host_memory_mib=16),
                retry=RetryPolicy(max_attempts=int(self.rng.integers(1, 3)), backoff_ms=30),
            )
            await self._send(log, JobSubmitted(job_id=job_id, spec=spec), f"submit-{job_id}")
            if self.rng.random() < 0.2:
                await insist(log, Message(Partition(Topic.JOBS, 0), b"garbage"))
            self.acknowledged[job_id] = FAILED if code == "1" else SUCCEEDED
            if kind < 0.2:
                await asyncio.sleep(float(self.rng.uniform(0, 1)))
                await self._send(log, JobCancelRequested(job_id=job_id), f"cancel-{job_id}")
                self.acknowledged[job_id] = EITHER
            await asyncio.sleep(float(self.rng.uniform(0, 0.5)))

    async def _send(self, log: Log, event: Event, event_id: str) -> None:
        headers, value = to_wire(Envelope(event_id, "/chaos/users", wall_ms(), event))
        await insist(log, Message(Partition(Topic.JOBS, 0), value, headers))

    async def _rest(self, follower: Follower, tasks: Sequence["asyncio.Future[None]"]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not (all(job in follower.ended for job in self.acknowledged) and await follower.answered()):
            for task in tasks:
                if task.done():
                    task.result()
                    raise AssertionError(f"{task} ended")
            left = [job for job in self.acknowledged if job not in follower.ended]
            assert asyncio.get_running_loop().time() < deadline, (
                f"after {PATIENCE_S:.0f} s of calm {left} have not ended, or inputs are unanswered: "
                f"{[(job.job_id, job.status, job.attempt) for job in follower.replica.state.jobs.values()]}"
            )
            await asyncio.sleep(0.1)
