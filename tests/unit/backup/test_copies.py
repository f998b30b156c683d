"""Copies of partitions: every record gets its offset again, whatever is missing between."""

import asyncio
from pathlib import Path

from penstock.backup.manifest import CopiedPartition, digest_of
from penstock.backup.partitions import copy_back
from penstock.log.archive import INDEX, Archive, Writer
from penstock.log.port import Partition, Record
from penstock.model.schema.topics import Topic
from tests.support.log.memory_log import MemoryBroker, MemoryLog

JOBS = Partition(Topic.JOBS, 0)


def test_records_between_which_others_are_missing_get_their_offsets_again(tmp_path: Path) -> None:
    """Kafka has markers of transactions between records, and a log may have expired in part: the ledger names
    what is left by its offset."""
    offsets, end = (2, 3, 5, 9), 12
    archive = Archive(tmp_path)
    writer = Writer(archive, JOBS)
    for offset in offsets:
        writer.add(Record(JOBS, offset, b"value %d" % offset, (), b"key", 1_000))
    writer.commit()
    sha256 = digest_of(archive.folder_of(JOBS) / INDEX)
    part = CopiedPartition(str(JOBS.topic), 0, 2, end, len(offsets), sha256)
    broker = MemoryBroker()
    broker.create({str(Topic.JOBS): 1})
    asyncio.run(copy_back(MemoryLog(broker), archive, part, lambda count: None))
    records = broker.records(JOBS)
    assert len(records) == end
    assert {record.offset: record.value for record in records if record.value} == {
        offset: b"value %d" % offset for offset in offsets
    }
    assert broker.first(JOBS) == 2
