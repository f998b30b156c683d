"""GPUs through the real nvidia-ml-py client, over a C library that pretends to be the driver's."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.log.embedded import EmbeddedLog
from penstock.log.port import Partition
from penstock.model import external_events
from penstock.model.envelope import from_wire
from penstock.model.topics import Topic, node_partition
from penstock.runtime.task_logs import log_path
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.faults import classify
from penstock_services.node_reporter.shell.inventory import identifier
from tests.support.fake_nvml import build_fake_nvml
from tests.support.node_cell import NODE, TOPICS, Cell, reporter_process, start_order

pytestmark = pytest.mark.postgres
XID, ECC = 8, 2


@pytest.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    log = await EmbeddedLog(dsn, "placer").start()
    await log.create(TOPICS)
    cell = Cell(log)
    yield cell
    await cell.close()
    await log.close()


async def test_gpus_are_found_used_measured_and_their_faults_reported(
    dsn: str, cell: Cell, tmp_path: Path
) -> None:
    """Inventory, a task on GPU 2 by its UUID, its utilisation, an application's Xid (no fault), then Xid 79."""
    events = tmp_path / "events"
    os.mkfifo(events)
    env = {
        "LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)),
        "FAKE_NVML_GPUS": "3",
        "FAKE_NVML_EVENTS": str(events),
    }
    options = Options(NODE, tmp_path / "state", tmp_path / "logs")
    async with reporter_process(options, dsn, env=env):
        joined = await cell.until(external_events.NodeJoined)
        assert [(gpu.index, gpu.memory_mib) for gpu in joined.node.gpus] == [
            (0, 16_384),
            (1, 16_384),
            (2, 16_384),
        ]
        assert joined.node.gpus[0].model == "Tesla-V100-SXM2-fake"
        await cell.order(start_order(1, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 4", gpus=(2,)))
        exited = await cell.until(external_events.TaskExited)
        assert log_path(options.log_dir, "job-1", "job-1.1.0").read_text().strip() == joined.node.gpus[2].uuid
        assert exited.usage.gpu_utilisation_percent == 73
        assert exited.usage.gpu_memory_mib == 1_024
        with events.open("w") as file:
            file.write(f"1 {XID} 31\n2 {XID} 79\n0 {ECC} 5\n")
        await cell.until(external_events.GpuFaulted, count=2)
    reported = [
        (e.gpu, e.fault, e.code)
        for e in cell.events(external_events.GpuFaulted)
        if isinstance(e, external_events.GpuFaulted)
    ]
    assert reported == [(2, "fell_off_bus", 79), (0, "ecc", 5)]
    reader = cell.log.reader({Partition(Topic.TELEMETRY, node_partition(NODE)): 0})
    samples = [from_wire(record.headers, record.value).data for record in await reader.read(timeout_ms=1_000)]
    await reader.close()
    assert 73 in [
        sample.gpu_utilisation_percent
        for sample in samples
        if isinstance(sample, external_events.TelemetrySampled)
    ]


def test_only_broken_gpus_are_faults() -> None:
    """Xid 13 and its like are a program's doing; taking the GPU away for them would empty the cluster."""
    assert classify(XID, 13) is None
    assert classify(XID, 48) == ("xid", 48)
    assert classify(XID, 79) == ("fell_off_bus", 79)
    assert classify(1, 1) is None


def test_product_names_become_identifiers() -> None:
    assert identifier("NVIDIA H200 (PCIe)") == "NVIDIA-H200-PCIe"
    assert identifier("???") == "unknown"
