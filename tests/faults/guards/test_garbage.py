"""More than a thousand pieces of garbage at every door, mixed with honest work."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest

from infra.devservers.kafka import KafkaBroker
from penstock.log.port import Message, Partition, Reader, Record
from penstock.model.inputs.dead_letters import DeadLettered
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.errors import EventError
from penstock.model.schema.topics import INPUT_TOPICS, Topic, node_partition
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock_services.projector.shell.rebuild import verify
from tests.faults.conftest import SEED, MakeCell
from tests.faults.processes.fault_cell import FaultCell
from tests.faults.processes.garbage import Garbage, Generator
from tests.faults.processes.judge import ends_of, judge, read_all

INPUTS = 800
ORDERS = 150
LEDGER = 150
REQUESTS = 200
REPEATS = 100  # of honest records, word for word
AT_ONCE = 4
BUSY = 503
MAX_GROWTH_MIB = 64  # of any service's resident memory
SERVICES = ("placer", "estimator", "projector", "gateway")
HEADER_SAFE = set(range(0x21, 0x7F)) | {0x20}


def rss_mib(cell: FaultCell, name: str) -> float:
    """Of the service's process now."""
    process = cell.slots[name].process
    assert process is not None
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4_096 / 1_048_576


async def waiting_job(cell: FaultCell) -> str:
    """A job that no proposal can place: it needs more GPUs than there are."""
    spec = JobSpec(command=("/bin/true",), resources=ResourceRequest(gpus=16, cores=1, host_memory_mib=1))
    await cell.users.send(JobSubmitted(job_id="patient", spec=spec), "submit-patient")
    return "patient"


async def post_garbage(cell: FaultCell, generator: Generator, rng: np.random.Generator) -> Counter[int]:
    """Answers by status. What is accepted is an ordinary event afterwards."""
    answers: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=cell.users.gateway or "", timeout=None) as client:
        for _ in range(REQUESTS):
            topic = list(INPUT_TOPICS)[int(rng.integers(len(INPUT_TOPICS)))]
            piece = generator.draw(topic)
            headers = {
                name.replace("ce_", "ce-"): raw.decode("latin-1")
                for name, raw in piece.headers
                if set(raw) <= HEADER_SAFE and len(raw) < 2_000
            }
            door = ("/v1/events", "/v1/jobs")[int(rng.integers(2))]
            kinds = (
                *["application/json"] * 5,
                "application/cloudevents+json",
                "application/yaml",
                "text/plain",
            )
            headers["content-type"] = kinds[int(rng.integers(len(kinds)))]
            while (
                answer := await client.post(door, content=piece.value, headers=headers)
            ).status_code == BUSY:
                pass  # the log has not acknowledged it in time, as on a busy machine
            answers[answer.status_code] += 1
            assert answer.status_code < 500, f"{door} {piece.kind} {piece.value[:200]!r}: {answer.text[:500]}"
    return answers


async def throw(cell: FaultCell, seed: int, nodes: list[str]) -> dict[str, int]:
    """Garbage at every door of the log, in random order, while honest jobs flow. Returns counts per door."""
    rng = np.random.default_rng(seed)
    generator = Generator(seed, waiting=[await waiting_job(cell)], nodes=nodes)
    repeats = Repeats(cell)
    counts: Counter[str] = Counter()
    plan = [
        *(Partition(topic, 0) for topic in INPUT_TOPICS for _ in range(INPUTS // len(INPUT_TOPICS))),
        *(Partition(Topic.ORDERS, node_partition(nodes[i % len(nodes)])) for i in range(ORDERS)),
        *(Partition(Topic.LEDGER, 0) for _ in range(LEDGER)),
    ]
    for place in rng.permutation(np.array(plan, dtype=object)):
        partition = Partition(Topic(place[0]), int(place[1]))
        piece: Garbage = generator.draw(Topic(partition.topic))
        await cell.users.insist(Message(partition, piece.value, piece.headers))
        counts[partition.topic] += 1
        if rng.random() < REPEATS / len(plan):
            await repeats.repeat(rng, partition)
            counts["repeats"] += 1
        await asyncio.sleep(0)
    await repeats.close()
    answers = await post_garbage(cell, generator, rng)
    counts["http"] = answers.total()
    print(f"\nHTTP answers: {dict(sorted(answers.items()))}")
    return counts


class Repeats:
    """Old records once more, word for word: as duplicates and late arrivals come in real life.

    Of nodes and jobs only what follows their joining: an old `NodeJoined` would be a machine's word that it
    has booted again.
    """

    def __init__(self, cell: FaultCell) -> None:
        self._cell = cell
        self._readers: dict[Partition, Reader] = {}
        self._old: dict[Partition, list[Record]] = {}

    async def repeat(self, rng: np.random.Generator, partition: Partition) -> None:
        """One of all that the partition holds by now."""
        if partition not in self._readers:
            self._readers[partition] = self._cell.log.reader({partition: 0})
        reader, old = self._readers[partition], self._old.setdefault(partition, [])
        end = (await ends_of(self._cell.log, [partition]))[partition]
        while reader.position(partition) < end:
            old += [record for record in await reader.read() if b'"boot_id"' not in record.value]
        if old:
            record = old[int(rng.integers(len(old)))]
            await self._cell.users.insist(Message(partition, record.value, record.headers, record.key))

    async def close(self) -> None:
        for reader in self._readers.values():
            await reader.close()


async def unread_orders(cell: FaultCell) -> Counter[tuple[str, int, int]]:
    """Unreadable orders on the nodes' partitions without exactly one dead letter, and letters about
    others."""
    left: Counter[tuple[str, int, int]] = Counter()
    for index in {node_partition(name) for name in cell.slots}:
        for record in await read_all(cell.log, Partition(Topic.ORDERS, index)):
            try:
                from_wire(record.headers, record.value, Topic.ORDERS)
            except EventError:
                left[Topic.ORDERS, index, record.offset] += 1
    for record in await read_all(cell.log, Partition(Topic.DEAD_LETTERS, 0)):
        letter = from_wire(record.headers, record.value, Topic.DEAD_LETTERS).data
        assert isinstance(letter, DeadLettered)
        if letter.service == "node-reporter":
            left[letter.source_topic, letter.source_partition, letter.source_offset] -= 1
    return Counter({place: count for place, count in left.items() if count})


async def survive(cell: FaultCell, log_url: str, dsn: str) -> None:
    """The whole scenario; `cell` is empty yet."""
    nodes = cell.nodes(2, armed=False)
    await cell.start(*nodes, *cell.services(*SERVICES, armed=False))
    for _ in range(10):
        await cell.users.some_job()
    await cell.settle()
    names = [*SERVICES, *(slot.name for slot in nodes)]
    before = {name: rss_mib(cell, name) for name in names}
    ledger_before = len(await read_all(cell.log, Partition(Topic.LEDGER, 0)))
    submitting = cell.background(cell.users.keep_submitting(cell.follower, AT_ONCE))
    counts = await throw(cell, SEED, [slot.name for slot in nodes])
    submitting.cancel()
    await cell.settle()
    for _ in range(3):
        await cell.users.submit((*cell.users.task_program, "0.01"), gpus=2)
    await cell.settle()
    growth = {name: rss_mib(cell, name) - before[name] for name in names}
    await cell.rest()
    await cell.projected()
    await cell.stop()
    verdict = await judge(
        cell.log, cell.histories, cell.users.acknowledged, cell.answered, exact_letters=True
    )
    found = await verify(Settings(log_url=log_url, dsn=dsn), cell.log)
    print(
        f"{dict(counts)}\n{verdict.summary()}\ngrowth in MiB: { {n: round(g, 1) for n, g in growth.items()} }"
    )
    assert verdict.problems == []
    assert await unread_orders(cell) == Counter()
    assert found["ok"], found
    assert cell.crashes == []
    assert verdict.void >= LEDGER
    assert ledger_before < verdict.records
    assert sum(counts.values()) >= 1_000
    assert max(growth.values()) < MAX_GROWTH_MIB, growth


@pytest.mark.postgres
async def test_garbage_on_the_embedded_log(make_cell: MakeCell, dsn: str) -> None:
    """A broken client, a broken node and a curious user, all at once."""
    cell = await make_cell(dsn, dsn)
    await survive(cell, dsn, dsn)


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.postgres
async def test_garbage_on_kafka(make_cell: MakeCell, broker: KafkaBroker, dsn: str) -> None:
    """The same through a real broker, which also carries headers as it likes."""
    cell = await make_cell(broker.url(), dsn)
    await survive(cell, broker.url(), dsn)
