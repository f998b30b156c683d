"""Telemetry of one node is bounded, whatever its tasks do; what is dropped is counted and logged, seldom."""

# clocks: the whole file runs in virtual time

import asyncio
import logging

import pytest

from penstock.log.port import Message, Partition
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock_services.node_reporter.shell.journal import Outgoing
from penstock_services.node_reporter.shell.link.samples import BURST, PER_S, REPORT_S, Samples
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter.node_cell import NODE, TOPICS
from tests.support.virtual_time import run_virtually

TELEMETRY = Partition(Topic.TELEMETRY, node_partition(NODE))


def envelope(id_: str, event: Event) -> Outgoing:
    headers, value = to_wire(Envelope(id=id_, source="/test", time_ms=1, data=event))
    return Outgoing(id_, Message(Partition(Topic.NODES, 0), value, headers, NODE.encode()))


def sample(at_ms: int, **measured: float) -> TelemetrySampled:
    return TelemetrySampled(node_id=NODE, task_id="job-1.1.0", at_ms=at_ms, **measured)


def broker() -> MemoryBroker:
    found = MemoryBroker()
    found.create(TOPICS)
    return found


def test_ten_thousand_samples_a_second_become_the_nodes_rate(caplog: pytest.LogCaptureFixture) -> None:
    """For two minutes; afterwards all is published again."""
    caplog.set_level(logging.WARNING)
    log = broker()

    async def storm() -> Samples:
        samples = Samples(MemoryLog(log, "node-reporter"), NODE, envelope)
        for number in range(12_000):
            for one in range(100):
                samples.publish(sample(100 * number + one, step_ms=1.0 + one))
            await asyncio.sleep(0.01)
        await asyncio.sleep(60)
        samples.publish(sample(9_999_999, step_ms=5.0))
        await asyncio.sleep(1)
        samples.close()
        return samples

    samples = run_virtually(storm())
    records = log.records(TELEMETRY)
    assert BURST + 0.9 * 120 * PER_S <= len(records) <= BURST + 120 * PER_S + 2
    assert samples.dropped == 1_200_001 - len(records)
    assert len(caplog.records) <= 2 + 180 / REPORT_S
    assert f"{samples.dropped} in all" in caplog.text
    last = from_wire(records[-1].headers, records[-1].value, Topic.TELEMETRY).data
    assert last == sample(9_999_999, step_ms=5.0)


def test_samples_of_one_millisecond_have_ids_of_their_own() -> None:
    """A tick measures several things of one task: readers that know an id already would pass over the
    others."""
    log = broker()
    measured: list[dict[str, float]] = [
        {"loss": 1.0},
        {"step_ms": 1.0},
        {"cpu_stalled_percent": 1.0},
        {"memory_bandwidth_percent": 1.0},
        {"cpu_percent": 1.0, "host_memory_mib": 1},
        {"gpu": 0, "gpu_utilisation_percent": 1.0},
        {"gpu": 1, "gpu_utilisation_percent": 1.0},
    ]

    async def tick() -> None:
        samples = Samples(MemoryLog(log, "node-reporter"), NODE, envelope)
        for fields in measured:
            samples.publish(sample(7, **fields))
        await asyncio.sleep(1)
        samples.close()

    run_virtually(tick())
    ids = {from_wire(record.headers, record.value).id for record in log.records(TELEMETRY)}
    assert len(ids) == len(measured)
