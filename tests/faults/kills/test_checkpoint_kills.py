"""Kill -9 of tasks, node-reporters and the placer while jobs save and move between two nodes: nothing runs
twice, no saved work is lost."""

import asyncio
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from infra.codegen.schemas import ROOT
from penstock.clock import wall_ms
from penstock.ledger.fold.evolve import evolve
from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Message, Partition
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.decisions.orders import HandOverCheckpoint, StartTask
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    JobCheckpointRequested,
    JobSubmitted,
    StepsMeasured,
)
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import MigrationProposed
from penstock.model.schema.event import Event
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.keys.log_keys import VARIABLE as LOG_KEY
from tests.faults.conftest import MakeCell
from tests.faults.processes import saving_task
from tests.faults.processes.fault_cell import SUCCEEDED, FaultCell
from tests.faults.processes.judge import judge, read_all
from tests.support.waiting import left_s

KILLS = 4  # in the CI run; `make faults` multiplies by 30
JOBS = 3
LINE_CHARS = 600
LONGEST_MOVE_S = 0.8  # from the proposal of a move until the task has begun elsewhere, mostly


class Attempt(NamedTuple):
    """What one attempt of a job has written down."""

    begun: int
    """Iterations that were over when it began."""
    done: int
    saved: list[int]


class Loss(NamedTuple):
    """An attempt that began before what the ledger knew."""

    task_id: str
    begun: int
    known: int


def attempts_of(path: Path) -> dict[int, Attempt]:
    """Attempt → what it did. Fails where its own iterations do not follow each other."""
    found: dict[int, Attempt] = {}
    for line in path.read_text().splitlines():
        number, kind, text = line.split()
        attempt, iteration = int(number), int(text)
        if kind == "from":
            assert attempt not in found, f"{path.stem}: attempt {attempt} began twice"
            found[attempt] = Attempt(iteration, iteration, [])
            continue
        last = found[attempt]
        if kind == "save":
            assert iteration == last.done
            last.saved.append(iteration)
        else:
            assert iteration == last.done + 1, (
                f"{path.stem}: attempt {attempt} goes from {last.done} to {iteration}"
            )
            found[attempt] = last._replace(done=iteration)
    assert list(found) == sorted(found), f"{path.stem}: attempts {list(found)}"
    return found


class Known:
    """What the ledger knew of a job's checkpoint when an attempt was placed, and what was fetched."""

    def __init__(self) -> None:
        self.iterations: dict[tuple[str, int], int] = {}
        """(job, attempt) → of the latest checkpoint that was reported before."""
        self.nodes: dict[tuple[str, int], str] = {}
        self.fetched: list[CheckpointFetched] = []
        self.lines: dict[str, list[str]] = {}
        """Job → what the ledger says of its attempts, for the message of a failed test: offset, ledger time,
        fact."""

    async def read(self, log: Log) -> "Known":
        replica = Replica()
        for record in await read_all(log, Partition(Topic.LEDGER, 0)):
            replica.take(
                record.value,
                record.offset,
                lambda raw, _place, fact, at=record.offset: self._fold(
                    replica.state, fact, f"{at} {raw.now_ms}"
                ),
            )
        return self

    def _fold(self, state: CellState, fact: Event, at: str) -> None:
        evolve(state, fact)
        task_id = getattr(fact, "task_id", "")
        job_id = getattr(fact, "job_id", task_id.split(".")[0])
        if job_id and not isinstance(fact, StepsMeasured):
            self.lines.setdefault(job_id, []).append(f"{at} {fact}"[:LINE_CHARS])
        if isinstance(fact, CheckpointFetched):
            self.fetched.append(fact)
        elif isinstance(fact, PlacementDecided):
            job = state.jobs[fact.job_id]
            key = (job.job_id, job.attempt)
            saved = job.saving.checkpoint
            self.iterations[key] = 0 if saved is None else saved.iteration or 0
            self.nodes[key] = fact.tasks[0].node_id


async def orders_about(log: Log, job_ids: set[str]) -> list[str]:
    """Orders to hand over checkpoints of these jobs, and starts of theirs."""
    found = []
    for index in range(NODE_PARTITIONS):
        for record in await read_all(log, Partition(Topic.ORDERS, index)):
            order = from_wire(record.headers, record.value, Topic.ORDERS).data
            if isinstance(order, StartTask) and order.job_id in job_ids:
                about = order.task_id, order.token, order.node_id, order.checkpoint, order.checkpoint_from
                found.append(f"{record.offset} start {about}"[:LINE_CHARS])
            elif isinstance(order, HandOverCheckpoint) and order.job_id in job_ids:
                found.append(f"{record.offset} {order}"[:LINE_CHARS])
    return found


async def history(cell: FaultCell, lost: list[Loss], known: Known, kills: list[str]) -> str:
    """All that is known of jobs that lost work."""
    job_ids = {loss.task_id.split(".")[0] for loss in lost}
    parts = ["saved work was lost, and nobody says why", *map(str, lost)]
    for job_id in sorted(job_ids):
        attempts = attempts_of(cell.histories / f"{job_id}.steps")
        parts.append(f"--- {job_id}: attempt, node, what it did")
        parts += [f"{number} {known.nodes[job_id, number]} {found}" for number, found in attempts.items()]
        parts += [f"--- {job_id} in the ledger: offset, time, fact", *known.lines[job_id]]
    parts += ["--- orders", *await orders_about(cell.log, job_ids)]
    parts += ["--- kills: wall time, whom", *kills]
    return "\n".join([*parts, *(f"--- {name}\n{cell.tail(name)}" for name in ("r1", "r2"))])


async def send(cell: FaultCell, topic: Topic, event: Event, event_id: str) -> None:
    headers, value = to_wire(Envelope(event_id, "/test/users", 1, event, correlation_id=event_id))
    await cell.users.insist(Message(Partition(topic, 0), value, headers))


def programs(folder: Path) -> list[psutil.Process]:
    """Training scripts of the cell that live."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(folder) in line and saving_task.__file__ in line:
            found.append(process)
    return found


def node_of(job: JobState) -> str:
    (task,) = job.tasks.values()
    return task.place.node_id


async def kill_one(cell: FaultCell, number: int) -> str:
    """A job is asked to move, or to save; somewhere on that way somebody dies. Whom it was; empty: nobody was
    there to kill."""
    rng = cell.rng
    running = [job for job in cell.follower.replica.state.jobs.values() if job.status is JobStatus.RUNNING]
    if running:
        job = running[int(rng.integers(len(running)))]
        here = node_of(job)
        if rng.random() < 0.75:
            there = "r2" if here == "r1" else "r1"
            move = MigrationProposed(
                proposal_id=f"move-{number}",
                proposer="test",
                job_id=job.job_id,
                nodes=(there,),
                reason="a try",
            )
            await send(cell, Topic.PROPOSALS, move, f"move-{number}")
        else:
            asked = JobCheckpointRequested(job_id=job.job_id, reason="a try", by="test")
            await send(cell, Topic.JOBS, asked, f"save-{number}")
    await asyncio.sleep(float(rng.uniform(0, LONGEST_MOVE_S)))  # clock: somebody dies at any moment
    victim = str(rng.choice(["task", "task", "r1", "r2", "placer"]))
    if victim != "task":
        cell.kill(victim)
        return victim
    living = programs(cell.histories)
    if not living:
        return ""
    try:
        living[int(rng.integers(len(living)))].kill()
    except psutil.NoSuchProcess:
        return ""
    return victim


def listens(cell: FaultCell, job: JobState) -> bool:
    """Whether its script has called `checkpoint`: before, it does not hear that it is to save."""
    path = cell.histories / f"{job.job_id}.steps"
    return job.status is JobStatus.RUNNING and path.exists() and job.attempt in attempts_of(path)


async def saved_now(cell: FaultCell, job: JobState, number: int) -> bool:
    """Asks a job to save. Whether the ledger knows of it while the attempt runs; one that was killed before
    saves nothing any more."""
    await cell.until(lambda: listens(cell, job), f"a run of {job.job_id}")
    attempt, before = job.attempt, job.saving.checkpoint
    asked = JobCheckpointRequested(job_id=job.job_id, reason="before a move", by="test")
    await send(cell, Topic.JOBS, asked, f"last-save-{number}")
    await cell.until(
        lambda: job.saving.checkpoint is not before or job.attempt != attempt, "an undisturbed save"
    )
    return job.attempt == attempt and job.status is JobStatus.RUNNING


async def move_undisturbed(cell: FaultCell) -> tuple[str, int]:
    """Nobody is killed any more: a job saves, and then goes on at the other node. The task there, and the
    iteration that was known.

    The last kill may have met the task that is to move, and a node that is slower than the other one's
    patience hands nothing over: then its next attempt.
    """
    job_id = next(iter(cell.users.acknowledged))
    jobs = cell.follower.replica.state.jobs
    await cell.until(lambda: job_id in jobs, f"{job_id} in the ledger")
    job = jobs[job_id]
    for number in itertools.count():
        if not await saved_now(cell, job, number):
            continue
        assert job.saving.checkpoint is not None
        attempt, saved = job.attempt, job.saving.checkpoint.iteration
        assert saved is not None
        here = node_of(job)
        there = "r2" if here == "r1" else "r1"
        move = MigrationProposed(
            proposal_id=f"last-move-{number}",
            proposer="test",
            job_id=job_id,
            nodes=(there,),
            reason="undisturbed",
        )
        await send(cell, Topic.PROPOSALS, move, f"last-move-{number}")
        await cell.until(
            lambda: job.attempt > attempt and job.status is JobStatus.RUNNING,  # noqa: B023
            "an undisturbed move",
        )
        task_id = f"{job_id}.{job.attempt}.w0"
        known = await Known().read(cell.log)
        if node_of(job) == there and [one.problem for one in known.fetched if one.task_id == task_id] == [""]:
            return task_id, saved
    raise AssertionError("it counts for ever")


def losses(job_id: str, path: Path, known: Known) -> tuple[Counter[str], list[Loss]]:
    """How many attempts `went on` and `moved`; and those that began before what the ledger knew."""
    counts: Counter[str] = Counter()
    lost, saved = [], {0}
    for attempt, found in attempts_of(path).items():
        assert found.begun in saved, (
            f"{job_id}: attempt {attempt} begins at {found.begun}, which nobody saved"
        )
        moved = known.nodes[job_id, attempt] != known.nodes.get((job_id, attempt - 1))
        counts.update({"moved": attempt > 1 and moved, "went on": found.begun > 0})
        if found.begun < known.iterations[job_id, attempt]:
            lost.append(Loss(f"{job_id}.{attempt}.w0", found.begun, known.iterations[job_id, attempt]))
        saved.update(found.saved)
    return counts, lost


@pytest.mark.postgres
async def test_kills_during_saves_and_moves(
    make_cell: MakeCell, dsn: str, scale: int, tmp_path: Path
) -> None:
    """Three trainings on two nodes that share no folder, moved to and fro. Each attempt begins at an
    iteration that was saved, and at none before the latest that the ledger knew of, unless its node says why;
    the scripts check themselves that nothing is missing or done twice. At last one of them moves while nobody
    dies: it goes on where it was for sure."""
    key = tmp_path / "logs.key"
    key.touch(0o600)
    key.write_bytes(b"k" * 32)
    cell = await make_cell(dsn, dsn, **{LOG_KEY: str(key)})
    await cell.start(
        *cell.nodes(2, armed=False, gpus=JOBS), *cell.services("placer", "estimator", armed=False)
    )
    spec = JobSpec(
        command=(sys.executable, "-S", saving_task.__file__, str(cell.histories)),
        env={"PYTHONPATH": f"{ROOT}/libs:{ROOT}"},
        resources=ResourceRequest(gpus=1, cores=1, host_memory_mib=16),
        retry=RetryPolicy(max_attempts=100, backoff_ms=30, backoff_max_ms=100),
        grace_ms=5_000,
        checkpoint="sdk",
    )
    for number in range(JOBS):
        await cell.users.send(JobSubmitted(job_id=f"t{number}", spec=spec), f"submit-{number}")
        cell.users.acknowledged[f"t{number}"] = SUCCEEDED
    kills: Counter[str] = Counter()
    killed = []
    while kills.total() - kills[""] < KILLS * scale:
        assert left_s() > 0, f"the whole run ends: {kills}"
        kills[whom := await kill_one(cell, kills.total())] += 1
        killed.append(f"{wall_ms()} {whom}")
    processes = lambda: [slot.process for slot in cell.slots.values()]  # noqa: E731
    await cell.until(
        lambda: all(one is not None and one.ready.is_set() for one in processes()), "the readiness of all"
    )
    last_task, last_saved = await move_undisturbed(cell)
    (cell.histories / "end").touch()
    await cell.rest()
    await cell.stop()
    verdict = await judge(cell.log, cell.histories, cell.users.acknowledged, cell.answered)
    known = await Known().read(cell.log)
    counts: Counter[str] = Counter()
    lost: list[Loss] = []
    for job_id in cell.users.acknowledged:
        own, its_losses = losses(job_id, cell.histories / f"{job_id}.steps", known)
        counts += own
        lost += its_losses
    failed = {fact.task_id: fact.problem for fact in known.fetched if fact.problem}
    print(
        f"\n{dict(kills)} killed; {counts['went on']} attempts went on at a checkpoint, {counts['moved']} "
        "began on the other node, "
        f"{len(known.fetched) - len(failed)} fetched, {len(failed)} could not: {failed}\n{verdict.summary()}"
    )
    assert verdict.problems == []
    assert cell.crashes == []
    unexplained = [loss for loss in lost if loss.task_id not in failed]
    assert not unexplained, await history(cell, unexplained, known, killed)
    if (
        not kills["r1"] + kills["r2"]
    ):  # then a node that hands nothing over was too slow, or its task is not wanted any more
        assert all("does not answer" in why or "is to stop" in why for why in failed.values()), failed
    job_id, attempt, _ = last_task.split(".")
    assert attempts_of(cell.histories / f"{job_id}.steps")[int(attempt)].begun >= last_saved
