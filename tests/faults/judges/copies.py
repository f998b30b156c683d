"""Copies of a cell that goes on, and restorations of them, on logs in memory: random retention, damage,
epochs.

Rule `copy`: every record has its offset again, the copied ledger answers no input that the copy lacks, a
damaged copy is refused, and no epoch begins twice.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec.structs import replace

from penstock.backup import restore as restoring
from penstock.backup import take as taking
from penstock.backup.manifest import LOG, Manifest, archive_in, write_manifest
from penstock.backup.progress import Progress
from penstock.backup.verify import verify
from penstock.errors import ConfigurationError
from penstock.ledger.record.record import read
from penstock.log.port import Message, Partition, Record
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.runtime.settings import Settings
from tests.faults.judges.cell_rules import Broken
from tests.faults.laboratory.patching import posing
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.log.memory_log import MemoryBroker, MemoryLog

LEDGER, JOBS = Partition(Topic.LEDGER, 0), Partition(Topic.JOBS, 0)
SETTINGS = Settings(log_url="memory", trace_ratio=0.0)
QUIET = Progress(lambda share, text="": None)


class Working(MemoryLog):
    """A log on which the cell goes on between any two questions."""

    site: "Site"

    async def end_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        found = await super().end_offsets(partitions)
        await self.site.submits(1)
        return found


class Site:
    """A cell whose placer is played by hand."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.jobs, self._answered = rng, 0, 0
        self.broker = MemoryBroker(conditional=True)
        self.broker.create(topic_partitions())
        self.log = MemoryLog(self.broker)
        self.placer = HandPlacer()
        self.placer.join(node_spec("n0", 4))

    async def submits(self, count: int) -> None:
        for _ in range(count):
            self.jobs += 1
            self.placer.submit(f"j{self.jobs}")
        fresh, self._answered = self.placer.values[self._answered :], len(self.placer.values)
        causes = [read(value).cause for value in fresh]
        inputs = [
            Message(Partition(cause.topic, 0), f"input {cause.event_id}".encode(), (("ce_id", b"x"),), b"key")
            for cause in causes
            if cause.topic is not None
        ]
        await self.log.append(inputs)
        if self.rng.random() < 0.3:
            await self.log.append([Message(LEDGER, b"void")])
        await self.placer.send(self.log)


async def _copy(site: Site, folder: Path) -> Manifest:
    working = Working(site.broker)
    working.site = site
    with posing(taking, "open_log", lambda *_: working):
        return await taking.take(folder, SETTINGS, {}, QUIET)


async def _restored(folder: Path) -> tuple[MemoryBroker, int]:
    """The new log and its epoch."""
    broker = MemoryBroker(conditional=True)
    with posing(restoring, "open_log", lambda *_: MemoryLog(broker)):
        found = await restoring.restore(folder, SETTINGS, {}, QUIET)
    return broker, found.epoch


def _content(records: Iterable[Record]) -> list[tuple[object, ...]]:
    return [(record.offset, record.value, record.headers, record.key) for record in records]


def _consistent(folder: Path, manifest: Manifest) -> None:
    ends = {part.topic: part.end for part in manifest.partitions}
    archive = archive_in(folder)
    for segment in archive.index(LEDGER).segments:
        for record in archive.read(LEDGER, segment):
            if record.value == b"void":
                continue
            cause = read(record.value).cause
            if cause.topic is not None and cause.offset >= ends[cause.topic]:
                raise Broken(
                    f"copy: the ledger answers {cause.topic} {cause.offset}, copied are {ends[cause.topic]}"
                )


def _same(site: Site, broker: MemoryBroker, manifest: Manifest) -> None:
    for part in manifest.partitions:
        if broker.first(part.place) != part.first:
            raise Broken(f"copy: {part.topic} begins at {broker.first(part.place)}, not at {part.first}")
        before = site.broker.records(part.place)[part.first : part.end]
        after = broker.records(part.place)[part.first : part.end]
        if _content(before) != _content(after):
            raise Broken(f"copy: records of {part.topic} are not what they were")


async def _play(seed: int, root: Path) -> None:
    rng = np.random.default_rng(seed)
    site = Site(rng)
    await site.submits(int(rng.integers(2, 6)))
    if rng.random() < 0.6:
        await site.log.delete_before({JOBS: int(rng.integers(1, 3))})
    epochs: list[int] = []
    copies = []
    for number in range(2):
        folder = root / f"copy-{number}"
        manifest = await _copy(site, folder)
        await verify(folder, QUIET)
        _consistent(folder, manifest)
        copies.append((folder, manifest))
        await site.submits(1)
    for at in (0, 1, 0):
        folder, manifest = copies[at]
        broker, epoch = await _restored(folder)
        if epoch in epochs:
            raise Broken(f"copy: epoch {epoch} begins twice")
        epochs.append(epoch)
        _same(site, broker, manifest)
    await _cut_short(*copies[1])
    await _damaged(rng, copies[0][0])


async def _damaged(rng: np.random.Generator, folder: Path) -> None:
    """One byte has changed, or the last segment of the ledger is another one: the copy is not restored."""
    files = sorted(path for path in (folder / LOG).rglob("*") if path.is_file())
    path = files[int(rng.integers(len(files)))]
    data = bytearray(path.read_bytes())
    data[int(rng.integers(len(data)))] ^= 1
    path.write_bytes(bytes(data))
    for trial in (_restored, lambda copy: verify(copy, QUIET)):
        try:
            await trial(folder)
        except ConfigurationError:
            continue
        raise Broken(f"copy: {path.name} was changed, and nobody notices")


async def _cut_short(folder: Path, manifest: Manifest) -> None:
    """All digests are right, and the chain does not lead to the head that the manifest names."""
    write_manifest(folder, replace(manifest, head=replace(manifest.head, seq=manifest.head.seq + 1)))
    try:
        await verify(folder, QUIET)
    except ConfigurationError:
        return
    raise Broken("copy: records are missing at its end, and nobody notices")


def play(seed: int) -> None:
    """Raises `Broken`."""
    assert set(INPUT_TOPICS)
    with TemporaryDirectory() as folder:
        asyncio.run(_play(seed, Path(folder)))
