"""All topics of a cell on the embedded log, as an earlier version wrote them: `golden/ledger.json.gz`."""

import asyncio
import gzip
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from penstock.ledger.replica.replica import Replica
from penstock.log.port import Message, Partition
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock_services.placer.shell.replay import Replayer, Report
from tests.support.log.memory_log import MemoryBroker, MemoryLog

GOLDEN = Path(__file__).with_name("golden")


@cache
def read(name: str) -> Any:
    """A packed JSON file of the folder `golden`."""
    return json.loads(gzip.decompress((GOLDEN / name).read_bytes()))


def folded() -> Replica:
    """The cell as of its last record."""
    replica = Replica()
    for record in read("ledger.json.gz")["topics"][Topic.LEDGER]:
        replica.take(record["value"].encode("latin1"), record["offset"])
    return replica


async def replayed() -> Report:
    """All its inputs decided again."""
    broker = MemoryBroker()
    broker.create({str(topic): 1 for topic in (Topic.LEDGER, *INPUT_TOPICS)})
    log = MemoryLog(broker, "golden")
    for topic, records in read("ledger.json.gz")["topics"].items():
        await log.append(
            [
                Message(
                    Partition(topic, 0),
                    record["value"].encode("latin1"),
                    tuple((key, value.encode("latin1")) for key, value in record["headers"]),
                )
                for record in records
            ]
        )
    return await Replayer(log, 0).run()


def decided_again() -> Sequence[bytes]:
    """The records that the present version decides otherwise, the first of them in full."""
    report = asyncio.run(replayed())
    found = [{"different": report.different, "identical": report.identical}, *report.differences]
    return [orjson.dumps(one, option=orjson.OPT_SORT_KEYS) for one in found]
