"""The promise of memory to a task that shares a GPU: kept by frameworks where they can, else watched by the node, which ends who breaks it."""

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.model.external_events import TelemetrySampled
from penstock.model.nodes import Gpu, NodeSpec
from penstock.sdk.gpu_memory import keep_promise, promised_mib
from penstock.sdk.phases import phase
from penstock_services.node_reporter.core.environment import task_environment
from penstock_services.node_reporter.shell import sampler as sampler_module
from penstock_services.node_reporter.shell.exits import outcome_of
from penstock_services.node_reporter.shell.ports import Exit
from penstock_services.node_reporter.shell.sampler import Sampler
from tests.support.meters import MetersWithoutContention
from tests.support.node_cell import start_order

GPU = "GPU-A"
NODE = NodeSpec(
    node_id="n1",
    boot_id="b",
    cores=8,
    host_memory_mib=1_024,
    gpus=(Gpu(index=0, uuid=GPU, model="V100", memory_mib=16_384),),
)
KEY = ("job-1.1.0", 1)


def shares(monkeypatch: pytest.MonkeyPatch, share: str, memory_mib: str) -> None:
    monkeypatch.setenv("PENSTOCK_GPU_SHARE", share)
    monkeypatch.setenv("PENSTOCK_GPU_MEMORY_MIB", memory_mib)


def pretended_torch(asked: list[tuple[float, int]], *, available: bool = True) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: available,
            get_device_properties=lambda device: SimpleNamespace(total_memory=16_384 << 20),
            set_per_process_memory_fraction=lambda fraction, device: asked.append((fraction, device)),
        )
    )


def test_torch_is_limited_to_the_promise_once_the_script_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of a card of 16 GiB; before the import there is nothing to limit, and nothing is imported for it."""
    shares(monkeypatch, "0.5", "4096")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not keep_promise()
    assert "torch" not in sys.modules
    asked: list[tuple[float, int]] = []
    monkeypatch.setitem(sys.modules, "torch", pretended_torch(asked))
    phase("launch")
    assert asked == [(0.25, 0)]


@pytest.mark.parametrize(
    ("share", "memory"),
    [("1", "4096"), ("0.5", "0"), ("0.5", "-1"), ("nan", "4096"), ("half", "4096"), ("0.5", "")],
)
def test_who_has_the_gpu_alone_or_no_figure_is_not_limited(
    monkeypatch: pytest.MonkeyPatch, share: str, memory: str
) -> None:
    shares(monkeypatch, share, memory)
    asked: list[tuple[float, int]] = []
    monkeypatch.setitem(sys.modules, "torch", pretended_torch(asked))
    assert promised_mib() is None
    assert not keep_promise()
    assert not asked


def test_a_torch_without_gpus_or_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shares(monkeypatch, "0.5", "4096")
    monkeypatch.setitem(sys.modules, "torch", pretended_torch([], available=False))
    assert not keep_promise()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert not keep_promise()


def shared_order(**more: Any) -> Any:
    order = start_order(1, gpu_uuids=(GPU,), **more)
    place = msgspec.structs.replace(order.place, gpu_share_milli=500, gpu_memory_mib=4_096)
    return msgspec.structs.replace(order, place=place)


def test_frameworks_that_read_variables_are_told_and_a_job_may_say_otherwise() -> None:
    found = task_environment(shared_order(), NODE, {}, {}, virtual=False, mps=True)
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.2500"
    assert found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4096M"
    without = task_environment(shared_order(), NODE, {}, {}, virtual=False)
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in without
    alone = task_environment(start_order(1, gpu_uuids=(GPU,)), NODE, {}, {}, virtual=False, mps=True)
    assert not {"XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"} & alone.keys()
    own = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    assert task_environment(shared_order(env=own), NODE, {}, {}, virtual=False).items() >= own.items()


class Meters(MetersWithoutContention):
    """16 GiB in use on the device; `own` of it by the task."""

    def __init__(self, own: list[int | None]) -> None:
        self._own = own

    def use(self, shim: int) -> tuple[float, int]:
        return 0.0, 100

    def gpu(self, uuid: str) -> tuple[float, int]:
        return 90.0, 16_000

    def gpu_memory_of(self, shim: int, uuid: str) -> int | None:
        return self._own.pop(0) if len(self._own) > 1 else self._own[0]


async def watched(
    own: list[int | None], promised_mib: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], int | None, str]:
    """(kills, peak MiB, evidence) after some ticks."""
    monkeypatch.setattr(sampler_module, "PERIOD_S", 0.005)
    killed: list[Any] = []
    published: list[TelemetrySampled] = []
    sampler = Sampler("n1", Meters(own), published.append, killed.append)
    sampler.follow(KEY, 1, {0: GPU}, promised_mib)
    await asyncio.sleep(0.1)
    usage, evidence = sampler.forget(KEY)
    return killed, usage.gpu_memory_mib, evidence


async def test_who_takes_more_than_promised_is_ended_with_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, peak_mib, evidence = await watched([4_000, 6_000], 4_096, monkeypatch)
    assert killed
    assert set(killed) == {KEY}
    assert peak_mib == 6_000
    assert evidence == "stopped by its node: it held 6000 MiB of a shared GPU, and was promised 4096"
    found = Exit(started_ms=1, exited_ms=2, exit_code=None, signal=9, cpu_ms=1, max_rss_kib=1)
    outcome = outcome_of(found, shared_order(), over=evidence)
    assert outcome is not None
    assert (outcome.exhausted, outcome.evidence) == ("gpu_memory", evidence)
    ended_itself = outcome_of(
        msgspec.structs.replace(found, exit_code=0, signal=None), shared_order(), over=evidence
    )
    assert ended_itself is not None
    assert not ended_itself.exhausted


@pytest.mark.parametrize(
    ("own", "promised_mib"),
    [
        ([4_400], 4_096),  # a context beside what the framework counts
        ([6_000, 4_000, 6_000, 4_000], 4_096),  # never twice in a row
        ([None], 4_096),  # the driver does not say whose memory it is
        ([16_000], 0),  # it has the GPU alone
    ],
)
async def test_nobody_else_is_ended(
    own: list[int | None], promised_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed, _, evidence = await watched(own, promised_mib, monkeypatch)
    assert not killed
    assert not evidence
