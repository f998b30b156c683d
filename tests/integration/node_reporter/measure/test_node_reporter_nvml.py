"""GPUs through the real nvidia-ml-py client, over a C library that pretends to be the driver's."""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.model.decisions.orders import Companion
from penstock.model.inputs import external_events
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.runtime.files.task_logs import log_path
from penstock_services.node_reporter.shell.measure.faults import classify
from penstock_services.node_reporter.shell.measure.inventory import identifier
from penstock_services.node_reporter.shell.measure.sampler import OVER_TICKS, PERIOD_S
from tests.faults.processes import judge_task
from tests.faults.processes.judge import Verdict, judge_runs
from tests.faults.processes.judge_node import read_history
from tests.support.cluster.driver import CellDriver, estimate
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.fake_nvml import build_fake_nvml
from tests.support.node_reporter.node_cell import (
    NODE,
    Cell,
    Telemetry,
    end_tasks,
    go_on,
    node_options,
    reporter_process,
    start_order,
    stop_order,
)
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
XID, ECC = 8, 2


cell = node_fixtures.embedded_cell


async def test_gpus_are_found_used_measured_and_their_faults_reported(
    dsn: str, cell: Cell, tmp_path: Path
) -> None:
    """Inventory, a task on GPU 2 and no other, its utilisation, an application's Xid (no fault), then Xid 79,
    which its driver repeats 600 times at once; another GPU's fault behind that is not lost."""
    events = tmp_path / "events"
    os.mkfifo(events)
    env = {
        "LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)),
        "FAKE_NVML_GPUS": "3",
        "FAKE_NVML_EVENTS": str(events),
    }
    options = node_options(tmp_path, virtual_gpus=None)
    async with reporter_process(options, dsn, env=env):
        joined = await cell.until(external_events.NodeJoined)
        assert [(gpu.index, gpu.memory_mib) for gpu in joined.node.gpus] == [
            (0, 16_384),
            (1, 16_384),
            (2, 16_384),
        ]
        assert joined.node.gpus[0].model == "Tesla-V100-SXM2-fake"
        await cell.order(
            start_order(
                1,
                "sh",
                "-c",
                "echo $CUDA_VISIBLE_DEVICES $PENSTOCK_GPUS; sleep 600",
                gpus=(2,),
                gpu_uuids=(joined.node.gpus[2].uuid,),
            )
        )
        telemetry = Telemetry(cell.log)
        await telemetry.until(lambda samples: 73 in [sample.gpu_utilisation_percent for sample in samples])
        await cell.order(stop_order(2, "job-1.1.0"))
        exited = await cell.until(external_events.TaskExited)
        uuid, isolation = joined.node.gpus[2].uuid, joined.node.isolation
        assert isolation is not None
        shown = (
            "0" if isolation.devices == "cgroup" else uuid
        )  # the only one that it can open, or one of three
        assert log_path(options.log_dir, "job-1", "job-1.1.0").read_text().split() == [shown, uuid]
        assert exited.usage.gpu_utilisation_percent == 73
        assert exited.usage.gpu_memory_mib == 1_024
        with events.open("w") as file:
            file.write(f"1 {XID} 31\n" + f"2 {XID} 79\n" * 600 + f"0 {ECC} 5\n")
        await cell.until(external_events.GpuFaulted, count=2)
    reported = [
        (e.gpu, e.fault, e.code)
        for e in cell.events(external_events.GpuFaulted)
        if isinstance(e, external_events.GpuFaulted)
    ]
    assert reported == [(2, "fell_off_bus", 79), (0, "ecc", 5)]
    await telemetry.close()


async def test_one_lost_gpu_stops_neither_the_reporter_nor_the_others(
    dsn: str, cell: Cell, tmp_path: Path
) -> None:
    """B falls off the bus at work, and C has an ECC error: reported, and again at each joining of this boot.

    At the next start NVML cannot even open B. Then its operator repairs C, and reports it.
    """
    cards, events = tmp_path / "cards", tmp_path / "events"
    os.mkfifo(events)
    cards.write_text("GPU-A\nGPU-B\nGPU-C\n")
    env = {
        "LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)),
        "FAKE_NVML_CARDS": str(cards),
        "FAKE_NVML_EVENTS": str(events),
    }
    options = node_options(tmp_path, virtual_gpus=None)
    async with reporter_process(options, dsn, env=env):
        assert (await cell.until(external_events.NodeJoined)).faults == ()
        with events.open("w") as file:
            file.write(f"1 0 0\n2 {ECC} 5\n")
        await cell.until(external_events.GpuFaulted, count=2)
    reported = [(e.uuid, e.fault) for e in cell.events() if isinstance(e, external_events.GpuFaulted)]
    assert reported == [("GPU-B", "fell_off_bus"), ("GPU-C", "ecc")]
    cards.write_text("GPU-A\nGPU-B lost\nGPU-C\n")
    before = (await cell.until(external_events.NodeJoined)).incarnation
    for arguments, faults in (((), [("GPU-C", "ecc", 5)]), (("--clear-gpu-faults",), []), ((), [])):
        async with reporter_process(options, dsn, *arguments, env=env):
            joined = await cell.next_join(before)
            before = joined.incarnation
            assert [gpu.uuid for gpu in joined.node.gpus] == ["GPU-A", "GPU-C"]
            assert [(fault.uuid, fault.fault, fault.code) for fault in joined.faults] == faults


class Placer:
    """The placer's core between one node's reports and its orders; the log is real."""

    def __init__(self, cell: Cell, program: tuple[str, ...]) -> None:
        self.core = CellDriver(PlacerSettings(profile="fifo"))
        self._cell = cell
        self._program = program
        self._fed = 0
        self._sent: set[tuple[str, int, int]] = set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Answers reports and sends orders until this holds."""
        while True:
            fresh, self._fed = self._cell.events()[self._fed :], len(self._cell.envelopes)
            for event in fresh:
                self.core.feed(event)
            for order in self.core.orders():
                key = (order.task_id, order.token, getattr(order, "incarnation", 0))
                if key not in self._sent:
                    self._sent.add(key)
                    await self._cell.order(order)
            if holds():
                return
            go_on(lambda: self.core.state.jobs)
            await self._cell.read(50)

    async def run(self, job_id: str) -> None:
        self.submit(job_id)
        await self.until(lambda: self.core.job(job_id).status is JobStatus.RUNNING)

    def submit(self, job_id: str) -> None:
        self.core.submit(
            job_id, JobSpec(command=self._program, grace_ms=0), estimate(1, cores=1, memory_mib=0)
        )


async def test_a_task_keeps_its_card_when_another_is_pulled(dsn: str, cell: Cell, tmp_path: Path) -> None:
    """B is hot-removed and the reporter restarted: C, where j3 runs, has B's index now.

    Each program holds a lock per card that the driver would give it: a program that finds one taken writes
    that down.
    """
    cards, histories = tmp_path / "cards", tmp_path / "histories"
    histories.mkdir()
    cards.write_text("GPU-A\nGPU-B\nGPU-C\nGPU-D\n")
    env = {"LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)), "FAKE_NVML_CARDS": str(cards)}
    options = node_options(tmp_path, virtual_gpus=None)
    placer = Placer(cell, (sys.executable, "-I", "-S", judge_task.__file__, str(histories), "600"))
    jobs = placer.core.state.jobs

    def ran() -> dict[str, list[str]]:
        path = histories / f"{NODE}.jsonl"
        lines = read_history(path) if path.exists() else []
        return {line["job"]: line["gpus"] for line in lines if line["kind"] == "ran"}

    try:
        async with reporter_process(options, dsn, env=env) as reporter:
            await placer.until(lambda: NODE in placer.core.state.nodes)
            for job_id in ("j1", "j2", "j3"):
                await placer.run(job_id)
            await await_until(lambda: ran() == {"j1": ["GPU-A"], "j2": ["GPU-B"], "j3": ["GPU-C"]}, ran)
            placer.core.feed(external_events.JobCancelRequested(job_id="j2"))
            await placer.until(lambda: "j2" not in jobs)
            await reporter.kill()
        cards.write_text("GPU-A\nGPU-C\nGPU-D\n")
        async with reporter_process(options, dsn, env=env):
            await placer.until(lambda: len(placer.core.state.nodes[NODE].spec.gpus) == 3)
            await placer.run("k4")
            await await_until(lambda: "k4" in ran(), ran)
            assert judged(histories) == ([], 4)
            assert ran()["k4"] == ["GPU-D"]
            placer.submit("k5")
            assert jobs["k5"].status is JobStatus.QUEUED
            placer.core.feed(external_events.JobCancelRequested(job_id="j3"))
            await placer.until(lambda: "k5" in jobs and jobs["k5"].status is JobStatus.RUNNING)
            await await_until(lambda: "k5" in ran(), ran)
            assert ran()["k5"] == ["GPU-C"]
    finally:
        end_tasks(options)
    assert judged(histories) == ([], 5)


def judged(histories: Path) -> tuple[list[str], int]:
    """What the tasks' own histories show: violations, and how many tasks ran."""
    verdict = Verdict()
    judge_runs(verdict, histories)
    return verdict.problems, verdict.runs


def test_only_broken_gpus_are_faults() -> None:
    """Xid 13 and its like are a program's doing; taking the GPU away for them would empty the cluster."""
    assert classify(XID, 13) is None
    assert classify(XID, 48) == ("xid", 48)
    assert classify(XID, 79) == ("fell_off_bus", 79)
    assert classify(1, 1) is None


def test_product_names_become_identifiers() -> None:
    assert identifier("NVIDIA H200 (PCIe)") == "NVIDIA-H200-PCIe"
    assert identifier("???") == "unknown"


async def test_a_task_that_holds_more_of_a_shared_gpu_than_promised_is_stopped_with_both_figures(
    dsn: str, cell: Cell, tmp_path: Path
) -> None:
    """By the driver's figures for its own processes; a neighbour's on the same GPU are not counted against
    it."""
    holders = tmp_path / "holders"
    holders.write_text("0 1 12000\n")
    env = {
        "LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)),
        "FAKE_NVML_GPUS": "1",
        "FAKE_NVML_HOLDERS": str(holders),
    }
    async with reporter_process(node_options(tmp_path, virtual_gpus=None), dsn, env=env):
        joined = await cell.until(external_events.NodeJoined)
        order = start_order(1, "sleep", "600", gpu_uuids=(joined.node.gpus[0].uuid,))
        place = replace(order.place, gpu_share_milli=500, gpu_memory_mib=4_096)
        await cell.order(replace(order, place=place))
        started = await cell.until(external_events.TaskStarted)
        fresh = tmp_path / "fresh"
        fresh.write_text(f"0 1 8000\n0 {started.pid} 6000\n")
        fresh.replace(holders)
        exited = await cell.until(external_events.TaskExited)
    assert exited.exhausted == "gpu_memory"
    assert exited.detail == "stopped by its node: it held 6000 MiB of a shared GPU, and was promised 4096"
    assert exited.usage.gpu_memory_mib == 6_000


async def test_members_of_a_group_are_held_to_their_memory_only_while_they_are_together(
    dsn: str, cell: Cell, tmp_path: Path
) -> None:
    """`first` trains alone and holds 5,000 MiB, more than was estimated; two jobs join it. `greedy` takes
    more than it was promised, and is stopped, since another member would run out of memory. `first`, which
    was there before, is not, nor `modest`. When all have left it, it may have the whole GPU.
    """
    holders = tmp_path / "holders"
    holders.write_text("")
    env = {
        "LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)),
        "FAKE_NVML_GPUS": "1",
        "FAKE_NVML_HOLDERS": str(holders),
    }
    pids: dict[str, int] = {}

    def hold(**held_mib: int) -> None:
        lines = [f"0 {pids[name]} {mib}" for name, mib in held_mib.items()]
        fresh = tmp_path / "fresh"
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(holders)

    async with reporter_process(node_options(tmp_path, virtual_gpus=None), dsn, env=env):
        joined = await cell.until(external_events.NodeJoined)
        known: list[Companion] = []
        for token, name in enumerate(("first", "greedy", "modest"), start=1):
            order = start_order(
                token,
                "sleep",
                "600",
                task_id=name,
                gpu_uuids=(joined.node.gpus[0].uuid,),
                companions=tuple(known),
            )
            await cell.order(replace(order, place=replace(order.place, gpu_memory_mib=4_096)))
            pids[name] = (await cell.until(external_events.TaskStarted, task_id=name)).pid
            known.append(Companion(task_id=name, token=token))
            hold(first=5_000)
        hold(first=5_000, greedy=6_000, modest=4_000)
        exited = await cell.until(external_events.TaskExited)
        assert (exited.task_id, exited.exhausted) == ("greedy", "gpu_memory")
        assert exited.detail == "stopped by its node: it held 6000 MiB of a shared GPU, and was promised 4096"
        assert exited.gpu_memory_limit_mib == 4_096
        await cell.order(stop_order(4, "modest"))
        assert (await cell.until(external_events.TaskExited, count=2)).task_id == "modest"
        hold(first=14_000)
        await asyncio.sleep((OVER_TICKS + 1) * PERIOD_S)  # clock: in which it would be stopped
        await cell.order(stop_order(5, "first"))
        ended = await cell.until(external_events.TaskExited, count=3)
    assert (ended.task_id, ended.cause, ended.exhausted) == ("first", "stopped", "")
