"""A whole cell of real processes under faults: supervised services, users who insist, and a follower who
watches.

Services are forked from a `Zygote`, restarted whenever they end, and armed with one failpoint after another.
A service that ends in any other way than by our kill is written down in `crashes`. Only where its last word
is that the log did not answer in time, as on a busy machine, it may end: its supervisor starts it again. All
waiting is for events and ends with the whole run (`tests.support.waiting`); a failed test tells the cell's
seed, its state, where the services wait, and what they logged.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import asyncpg
import httpx
import numpy as np

from infra.devservers.processes import free_port
from penstock.clock import wall_ms
from penstock.errors import LogError
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.model.wire.codec import encode
from penstock.model.wire.envelope import Envelope, to_wire
from tests.faults.processes import judge_task
from tests.faults.processes.judge import ends_of
from tests.faults.processes.slots import Slot, failpoint_cycle
from tests.faults.processes.zygote import Process, Zygote
from tests.support.story import told
from tests.support.waiting import await_until

TOPICS = topic_partitions()
LEDGER = Partition(Topic.LEDGER, 0)
NODE_MODULES = frozenset({"tests.faults.processes.judge_node", "penstock_services.node_reporter"})
STACKS_S = 0.5  # in which services of a failed test write down where they wait
RETRY_S = 0.05
BETWEEN_KILLS = (
    4,
    40,
)  # ledger records: what is killed often still works in between, however slow the machine
AFTER_RECORD_S = 0.2  # at most, from that record until the kill
TAIL_CHARS = 3_000
LOG_TOO_SLOW = "did not answer"

SUCCEEDED = frozenset({"succeeded"})
FAILED = frozenset({"failed"})
EITHER = frozenset({"succeeded", "cancelled"})


def _is_ready_or_ended(process: Process) -> bool:
    return process.ready.is_set() or process.ended.is_set()


def _has(replica: Replica, seq: int) -> bool:
    return replica.head.seq >= seq


class Follower:
    """Folds the ledger as it grows, in the test's own process."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.replica = Replica()

    async def run(self) -> None:
        ledger = LEDGER
        reader = self._log.reader({ledger: 0})
        try:
            while True:
                for record in await reader.read():
                    self.replica.take(record.value, record.offset)
        finally:
            await reader.close()

    @property
    def ended(self) -> Mapping[str, str]:
        return self.replica.state.ended

    async def answered(self) -> Mapping[str, int]:
        """Where the inputs end, by topic, if each of their records has its ledger record; else nothing."""
        ends = await ends_of(self._log, [Partition(topic, 0) for topic in INPUT_TOPICS])
        positions = self.replica.state.positions
        done = all(positions.get((p.topic, p.index), 0) >= end for p, end in ends.items())
        return {p.topic: end for p, end in ends.items()} if done else {}


class Users:
    """They submit until the gateway accepts, and remember what was acknowledged."""

    def __init__(self, log: Log, seed: int) -> None:
        self._log = log
        self._rng = np.random.default_rng(seed)
        self.acknowledged: dict[str, frozenset[str]] = {}
        self.task_program: tuple[str, ...] = ("/bin/sleep",)
        """Gets one argument: seconds."""
        self.gateway: str | None = None
        """Its URL: every other job then goes through it."""
        self._numbers = 0

    async def post(self, spec: JobSpec, key: str) -> str:
        """Through the gateway until it accepts; the job's id. No answer and 503 mean: again, with the same
        key."""
        body, headers = encode(spec).decode(), {"Idempotency-Key": key, "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=self.gateway or "", timeout=None, verify=False) as client:
            while True:
                try:
                    answer = await client.post("/v1/jobs", content=body, headers=headers)
                except httpx.TransportError:
                    await asyncio.sleep(RETRY_S)  # clock: between two tries of a user
                    continue
                if answer.status_code in (200, 202):
                    return str(answer.json()["job_id"])
                assert answer.status_code in (429, 503), f"{answer.status_code}: {answer.text}"
                await asyncio.sleep(RETRY_S)  # clock: between two tries of a user

    async def send(self, event: Event, event_id: str) -> None:
        """Until the log has taken it; an unknown outcome means: again, under the same id."""
        headers, value = to_wire(Envelope(event_id, "/test/users", wall_ms(), event, correlation_id=event_id))
        await self.insist(Message(Partition(Topic.JOBS, 0), value, headers))

    async def insist(self, *messages: Message) -> None:
        while True:
            try:
                await self._log.append(messages)
            except LogError:
                await asyncio.sleep(RETRY_S)  # clock: between two tries of a user
            else:
                return

    async def submit(
        self,
        command: Sequence[str],
        allowed: frozenset[str] = SUCCEEDED,
        *,
        gpus: int = 1,
        workers: int = 1,
        attempts: int = 1,
    ) -> str:
        """One job, acknowledged. Its outcome must be one of `allowed`."""
        self._numbers += 1
        job_id = f"job-{self._numbers}"
        spec = JobSpec(
            command=tuple(command),
            workers=workers,
            resources=ResourceRequest(gpus=gpus, cores=1, host_memory_mib=16),
            retry=RetryPolicy(max_attempts=attempts, backoff_ms=30),
            grace_ms=200,
        )
        if self.gateway is not None and self._numbers % 2:
            job_id = await self.post(spec, f"key-{self._numbers}")
        else:
            await self.send(JobSubmitted(job_id=job_id, spec=spec), f"submit-{job_id}")
        self.acknowledged[job_id] = allowed
        return job_id

    async def some_job(self) -> None:
        """One of a mixture: plain ones, gangs, failing ones, cancelled ones; now and then it is only
        garbage."""
        rng = self._rng
        seconds = f"{rng.uniform(0.005, 0.12):.3f}"
        kind = rng.random()
        if kind < 0.05:
            await self.insist(Message(Partition(Topic.JOBS, 0), rng.bytes(40)))
        elif kind < 0.6:
            await self.submit((*self.task_program, seconds), gpus=int(rng.integers(1, 3)))
        elif kind < 0.8:
            await self.submit((*self.task_program, seconds), workers=int(rng.integers(2, 5)))
        elif kind < 0.9:
            await self.submit(("/bin/false",), FAILED, attempts=int(rng.integers(1, 3)))
        else:
            job_id = await self.submit((*self.task_program, "0.4"), EITHER)
            await asyncio.sleep(float(rng.uniform(0, 0.3)))  # clock: any outcome of this job is allowed
            await self.send(JobCancelRequested(job_id=job_id), f"cancel-{job_id}")

    async def keep_submitting(self, follower: Follower, at_once: int) -> None:
        """For ever, with at most `at_once` jobs under way."""
        while True:
            if len(self.acknowledged) - len(follower.ended) < at_once:
                await self.some_job()
            await asyncio.sleep(0.005)  # clock: between two looks for ever


class FaultCell:
    """Services, users and follower over one log."""

    def __init__(
        self, zygote: Zygote, log: Log, folder: Path, settings: Mapping[str, str], seed: int
    ) -> None:
        """`settings`: the environment of every service; `log`: the test's own connection."""
        self.seed = seed
        self.zygote = zygote
        self.log = log
        self.folder = folder
        self.histories = folder / "histories"
        self.histories.mkdir(parents=True)
        self.rng = np.random.default_rng(seed)
        self.slots: dict[str, Slot] = {}
        self.kills: Counter[str] = Counter()
        self.crashes: list[str] = []
        self.follower = Follower(log)
        self.users = Users(log, seed)
        self._settings = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(folder),
            "PENSTOCK_LOG_LEVEL": "WARNING",
            "PENSTOCK_TRACE_RATIO": "0",
            **settings,
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._held = ExitStack()
        """Stories of failures, and the gateway's port."""
        self.answered: Mapping[str, int] = {}
        """Where the inputs ended, by topic, when all of them were answered. What lands later, of a process
        that has ended long since, need not be."""

    async def open(self) -> None:
        await self.log.create(TOPICS)
        self.zygote.attach()
        self._held.enter_context(told("the cell", self.trace))
        self.background(self.follower.run())

    def background(self, work: "asyncio.Future[None] | object") -> "asyncio.Task[None]":
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[arg-type]
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Kills whatever still runs; leaves nothing behind."""
        for slot in self.slots.values():
            slot.keep = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.zygote.detach()
        self._held.close()

    # ---------------------------------------------------------------------------------------- services

    async def start(self, *slots: Slot) -> None:
        """Starts them and waits until each has reported that it is ready (or was killed before)."""
        for slot in slots:
            self.slots[slot.name] = slot
            self._held.enter_context(told(f"{slot.name}.log", self.folder / f"{slot.name}.log"))
            self._spawn(slot)
            slot.keeper = self.background(self._keep(slot))
        for slot in slots:
            process = slot.process
            assert process is not None
            await self.until(partial(_is_ready_or_ended, process), f"{slot.name} is ready")

    def judges(self, count: int, gpus: int = 4) -> list[Slot]:
        """Fake nodes n1 … n`count`."""
        return [
            Slot(
                f"n{i}",
                "tests.faults.processes.judge_node",
                ("--node-id", f"n{i}", "--gpus", str(gpus), "--history", str(self.histories / f"n{i}.jsonl")),
            )
            for i in range(1, count + 1)
        ]

    def services(self, *names: str, armed: bool = True) -> list[Slot]:
        """`placer`, `estimator`, `projector`, `gateway`, each to be killed at its failpoints in turn."""
        slots = []
        for name in names:
            slot = Slot(
                name,
                f"penstock_services.{name}",
                failpoints=failpoint_cycle(name, self.rng, self.kills) if armed else None,
            )
            if name == "gateway":
                port = self._hold(free_port())
                slot.env["PENSTOCK_GATEWAY_BIND"] = f"127.0.0.1:{port}"
                self.users.gateway = f"http://127.0.0.1:{port}"
            slots.append(slot)
        return slots

    def _hold(self, port: int) -> int:
        """Nobody else gets it while the gateway is down: the socket is bound, and does not listen."""
        held = self._held.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway's own
        held.bind(("127.0.0.1", port))
        return port

    def nodes(self, count: int, *, armed: bool = True, gpus: int = 4) -> list[Slot]:
        """Real node-reporters r1 … r`count`; their tasks judge themselves."""
        self.users.task_program = (
            sys.executable,
            "-I",
            "-S",
            judge_task.__file__,
            str(self.histories),
        )
        return [
            Slot(
                f"r{i}",
                "penstock_services.node_reporter",
                (
                    "--node-id",
                    f"r{i}",
                    "--allow-root",
                    "--virtual-gpus",
                    str(gpus),
                    "--cores",
                    "64",
                    "--host-memory",
                    "64GiB",
                    "--state-dir",
                    str(self.folder / f"r{i}"),
                    "--log-dir",
                    str(self.folder / "logs"),
                ),
                failpoints=failpoint_cycle("node", self.rng, self.kills) if armed else None,
            )
            for i in range(1, count + 1)
        ]

    @property
    def service_kills(self) -> int:
        """Without crashes of whole machines, and without those that only disarm."""
        return sum(count for why, count in self.kills.items() if why not in ("machine", "disarm", "end"))

    def _spawn(self, slot: Slot) -> None:
        slot.armed = None if slot.failpoints is None else next(slot.failpoints)
        env = self._settings | slot.env
        if slot.armed is not None:
            env = env | {"PENSTOCK_FAILPOINT": slot.armed}
        slot.hit_by = None
        slot.process = self.zygote.spawn(slot.module, slot.arguments, env, self.folder / f"{slot.name}.log")

    async def _keep(self, slot: Slot) -> None:
        while True:
            process = slot.process
            assert process is not None
            await process.ended.wait()
            if slot.hit_by is not None:
                self.kills[slot.hit_by] += 1
            elif process.killed and slot.armed is not None:
                self.kills[slot.armed.partition(":")[0]] += 1
            elif slot.keep and not slot.may_exit and LOG_TOO_SLOW not in self.last_line(slot.name):
                self.crashes.append(f"{slot.name}: {process.describe_end()}")
            if not slot.keep:
                return
            if not process.killed:
                await asyncio.sleep(RETRY_S)  # clock: it fails by itself, do not spin
            self._spawn(slot)

    def kill(self, name: str, why: str = "random", number: int = signal.SIGKILL) -> None:
        """Kill -9, counted under `why`."""
        slot = self.slots[name]
        if slot.process is not None and slot.process.started.is_set() and slot.hit_by is None:
            slot.hit_by = why
            self.zygote.signal(slot.process, number)

    async def kill_at_random(self, names: Sequence[str], why: str = "random", times: int = 1) -> None:
        """For ever: the ledger grows by `times` as many records as `BETWEEN_KILLS`, then one of these
        services dies."""
        head = self.follower.replica
        while True:
            seq = head.head.seq + times * int(self.rng.integers(*BETWEEN_KILLS))
            await await_until(partial(_has, head, seq), "work between two kills")
            await asyncio.sleep(
                float(self.rng.uniform(0, AFTER_RECORD_S))
            )  # clock: at any moment of its work
            self.kill(str(self.rng.choice(list(names))), why)

    def disarm(self) -> None:
        """From the next start on nothing kills itself; what is armed now is restarted."""
        for slot in self.slots.values():
            if slot.failpoints is not None:
                slot.failpoints = None
                self.kill(slot.name, "disarm")

    async def stop(self, *names: str) -> None:
        """SIGTERM once they are ready, for before that nobody listens to it; a service that does not end well
        is a crash."""
        chosen = [self.slots[name] for name in names or list(self.slots)]
        await self.until(lambda: all(slot.settled for slot in chosen), "the readiness of all who stop")
        living = []
        for slot in chosen:
            slot.keep = False
            if slot.process is not None and not slot.process.ended.is_set():
                self.zygote.signal(slot.process, signal.SIGTERM)
                living.append((slot, slot.process))
        for slot, process in living:
            await self.until(process.ended.is_set, f"the end of {slot.name} on SIGTERM")
            by_failpoint = (
                process.killed and slot.armed is not None
            )  # armed just before `disarm`, passed at the end
            if process.status != 0 and not by_failpoint:
                self.crashes.append(f"{slot.name}: {process.describe_end()} on SIGTERM")

    # ---------------------------------------------------------------------------------------- watching

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits. Fails at once where one of the cell's helpers has failed."""

        def found() -> bool:
            for task in self._tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    raise AssertionError(f"{what}: a helper failed") from task.exception()
            return condition()

        await await_until(found, what)

    async def settle(self) -> None:
        """All acknowledged jobs ended, every input answered."""
        ended = self.follower.ended
        await self.until(lambda: all(job in ended for job in self.users.acknowledged), "the end of every job")
        self.answered = await await_until(self.follower.answered, "answers to all inputs")

    async def rest(self) -> None:
        """Settles for good: who was killed last is back, for a placer then writes a record; nodes stop first,
        for they may still repeat themselves; then all is answered, also what the log had still under way for
        them when they ended.
        """
        await self.settle()
        await self.until(lambda: all(slot.settled for slot in self.slots.values()), "the readiness of all")
        await self.stop(*(name for name, slot in self.slots.items() if slot.module in NODE_MODULES))
        self.answered = await await_until(self.follower.answered, "answers to the nodes' last reports")

    async def projected(self) -> None:
        """Waits until the read models stand where the ledger ends."""
        connection = await asyncpg.connect(self._settings["PENSTOCK_DSN"])
        replica = self.follower.replica

        async def seen() -> bool:
            seq = await connection.fetchval("SELECT max(seq) FROM penstock.positions")
            end = (await ends_of(self.log, [LEDGER]))[LEDGER]
            return bool(seq == replica.head.seq and replica.offset == end)

        try:
            _: bool = await await_until(seen, lambda: f"the projection of seq {replica.head.seq}")
        finally:
            await connection.close()

    def last_line(self, name: str) -> str:
        return self.tail(name).rstrip().rpartition("\n")[2]

    def tail(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-TAIL_CHARS:] if path.exists() else "(no output)"

    def trace(self) -> str:
        """What a failed test tells of the cell. Afterwards each log of a living service ends with where its
        tasks wait."""
        living = [
            slot.process for slot in self.slots.values() if slot.process and not slot.process.ended.is_set()
        ]
        for process in living:
            self.zygote.signal(process, signal.SIGUSR1)
        time.sleep(STACKS_S)  # clock: a failed test only tells less where this is too short
        state = self.follower.replica.state
        lines = [
            f"seed {self.seed}: ledger seq {state.seq}, term {state.term}, {len(state.ended)} jobs ended of "
            f"{len(self.users.acknowledged)} acknowledged, frozen {state.frozen!r}, kills {dict(self.kills)}",
            *(
                f"  {job.job_id} {job.status} attempt {job.attempt} {job.exit.failure}"
                for job in list(state.jobs.values())[:20]
            ),
            *(
                f"  node {node.spec.node_id} {node.status} holds {list(node.tasks)}"
                for node in state.nodes.values()
            ),
            *(
                f"  {slot.name}: {'ready' if slot.settled else 'not ready'}, armed {slot.armed}"
                for slot in self.slots.values()
            ),
            f"crashes: {self.crashes}",
        ]
        return "\n".join(lines)
