"""The promise of memory to a task that shares GPUs, by a part of one or as a member of a group: kept by
frameworks where they can, else watched by the node, which ends the task that breaks it."""

# clocks: what waits here runs in virtual time

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from penstock.model.decisions.orders import Companion
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.sdk.gpu_memory import keep_promise, promised_mib
from penstock.sdk.phases import phase
from penstock_services.node_reporter.core.environment import task_environment
from penstock_services.node_reporter.shell.measure import sampler as sampler_module
from penstock_services.node_reporter.shell.measure.sampler import Measured, Sampler
from penstock_services.node_reporter.shell.ports import Exit
from penstock_services.node_reporter.shell.process.exits import outcome_of
from tests.support.node_reporter.meters import MetersWithoutContention
from tests.support.node_reporter.node_cell import start_order
from tests.unit.virtually import virtually

GPU = "GPU-A"
NODE = NodeSpec(
    node_id="n1",
    boot_id="b",
    cores=8,
    host_memory_mib=1_024,
    gpus=(Gpu(index=0, uuid=GPU, model="V100", memory_mib=16_384),),
)
KEY = ("job-1.1.0", 1)


def limited(monkeypatch: pytest.MonkeyPatch, limit_mib: str) -> None:
    """The variables of a task that was promised 4 GiB."""
    monkeypatch.setenv("PENSTOCK_GPU_MEMORY_MIB", "4096")
    monkeypatch.setenv("PENSTOCK_GPU_MEMORY_LIMIT_MIB", limit_mib)


def pretended_torch(asked: list[tuple[float, int]], *, available: bool = True, current: int = 0) -> Any:
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: available,
            current_device=lambda: current,
            get_device_properties=lambda device: SimpleNamespace(total_memory=16_384 << 20),
            set_per_process_memory_fraction=lambda fraction, device: asked.append((fraction, device)),
        )
    )


def test_torch_is_limited_to_the_promise_once_the_script_has_imported_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of a card of 16 GiB; before the import there is nothing to limit, and nothing is imported for
    it."""
    limited(monkeypatch, "4096")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not keep_promise()
    assert "torch" not in sys.modules
    asked: list[tuple[float, int]] = []
    monkeypatch.setitem(sys.modules, "torch", pretended_torch(asked))
    phase("launch")
    assert asked == [(0.25, 0)]


def test_a_process_of_a_group_member_limits_its_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process per GPU, the second of two here; a limit on the other GPU would take memory of it for a
    context."""
    limited(monkeypatch, "8192")
    asked: list[tuple[float, int]] = []
    monkeypatch.setitem(sys.modules, "torch", pretended_torch(asked, current=1))
    assert keep_promise()
    assert asked == [(0.5, 1)]


@pytest.mark.parametrize("limit_mib", ["0", "-1", "nan", "half", ""])
def test_a_task_without_a_limit_is_not_limited_to_its_estimate(
    monkeypatch: pytest.MonkeyPatch, limit_mib: str
) -> None:
    limited(monkeypatch, limit_mib)
    asked: list[tuple[float, int]] = []
    monkeypatch.setitem(sys.modules, "torch", pretended_torch(asked))
    assert promised_mib() is None
    assert not keep_promise()
    assert not asked


def test_a_torch_without_gpus_or_of_another_shape_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, "4096")
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
    assert (found["PENSTOCK_GPU_MEMORY_LIMIT_MIB"], alone["PENSTOCK_GPU_MEMORY_LIMIT_MIB"]) == ("4096", "0")
    own = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}
    assert task_environment(shared_order(env=own), NODE, {}, {}, virtual=False).items() >= own.items()


def member_order(*companions: str) -> Any:
    """A task with two whole GPUs, of which 4 GiB each are booked for it."""
    known = tuple(Companion(task_id=task_id, token=1) for task_id in companions)
    order = start_order(2, gpus=(0, 1), gpu_uuids=(GPU, "GPU-B"), companions=known)
    return msgspec.structs.replace(order, place=msgspec.structs.replace(order.place, gpu_memory_mib=4_096))


def test_a_member_of_a_group_is_limited_on_each_gpu_as_a_task_with_a_part_of_one() -> None:
    """It joins a running job: the sum of what both were promised fits, so that neither may take more. The job
    that runs already began alone, and has no limit."""
    limits = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2500",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=4096M,1=4096M",
        "PENSTOCK_GPU_MEMORY_LIMIT_MIB": "4096",
        "PENSTOCK_GPU_SHARE": "1",
    }
    found = task_environment(member_order("job-1.1.0"), NODE, {}, {}, virtual=False, mps=True)
    assert found.items() >= limits.items()
    alone = task_environment(member_order(), NODE, {}, {}, virtual=False, mps=True)
    assert alone["PENSTOCK_GPU_MEMORY_LIMIT_MIB"] == "0"
    assert alone["PENSTOCK_GPU_MEMORY_MIB"] == "4096"
    assert alone["PENSTOCK_HOST_MEMORY_MIB"] == str(member_order().place.host_memory_mib)
    assert not limits.keys() - {"PENSTOCK_GPU_MEMORY_LIMIT_MIB", "PENSTOCK_GPU_SHARE"} & alone.keys()


class Meters(MetersWithoutContention):
    """16 GiB in use on the device; `own` of it by the task, the next figure at each question. `other`: on
    each GPU but the first."""

    def __init__(self, own: list[int | None], other: int = 0) -> None:
        self._own, self._other = own, other

    def use(self, shim: int) -> tuple[float, int]:
        return 0.0, 100

    def gpu(self, uuid: str) -> tuple[float, int]:
        return 90.0, 16_000

    def gpu_memory_of(self, shim: int, uuid: str) -> int | None:
        if uuid != GPU:
            return self._other
        return self._own.pop(0) if len(self._own) > 1 else self._own[0]


async def watched(
    own: list[int | None],
    promised_mib: int | list[int],
    *,
    limited: bool = True,
    other: int = 0,
) -> tuple[list[Any], Measured]:
    """(kills, measurements) after some ticks. `promised_mib`: at each question, the last one from then on; 0:
    it has the GPUs alone. Its own memory is asked for only while it does not."""
    killed: list[Any] = []
    published: list[TelemetrySampled] = []
    promised = [promised_mib] if isinstance(promised_mib, int) else promised_mib

    def promise(task_id: str, token: int) -> int:
        assert (task_id, token) == KEY
        return promised.pop(0) if len(promised) > 1 else promised[0]

    sampler = Sampler("n1", Meters(own, other), published.append, killed.append, promise)
    sampler.follow(KEY, 1, {0: GPU, 1: "GPU-B"} if other else {0: GPU}, limited)
    await asyncio.sleep(20.5 * sampler_module.PERIOD_S)
    return killed, sampler.forget(KEY)


@virtually
async def test_who_takes_more_than_promised_is_ended_with_both_figures() -> None:
    killed, (usage, evidence, limit_mib) = await watched([4_000, 6_000], 4_096)
    assert killed
    assert set(killed) == {KEY}
    assert (usage.gpu_memory_mib, limit_mib) == (6_000, 4_096)
    assert evidence == "stopped by its node: it held 6000 MiB of a shared GPU, and was promised 4096"
    found = Exit(started_ms=1, exited_ms=2, exit_code=None, signal=9, cpu_ms=1, max_rss_kib=1)
    outcome = outcome_of(found, shared_order(), over=evidence, limit_mib=limit_mib)
    assert outcome is not None
    assert (outcome.exhausted, outcome.evidence) == ("gpu_memory", evidence)
    assert outcome.gpu_memory_limit_mib == 4_096
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
@virtually
async def test_nobody_else_is_ended(own: list[int | None], promised_mib: int) -> None:
    killed, found = await watched(own, promised_mib)
    assert not killed
    assert not found.evidence


@virtually
async def test_a_task_is_stopped_for_the_gpu_on_which_it_holds_most() -> None:
    """A gang's worker with two GPUs; on one of them it stays within its promise."""
    for first, other in ((6_000, 3_000), (3_000, 6_000)):
        killed, found = await watched([first], 4_096, other=other)
        assert killed
        assert "it held 6000 MiB of a shared GPU, and was promised 4096" in found.evidence
    killed, _ = await watched([6_000, 4_000], 4_096, other=4_100)
    assert not killed, "one tick beyond it on one GPU"


@virtually
async def test_a_job_that_others_join_is_stopped_only_for_what_it_takes_after_that() -> None:
    """It had the GPU alone, without any limit, and nobody is stopped for a group: it keeps what it holds when
    the first companion comes."""
    killed, found = await watched([6_000, 6_300], [0, 4_096], limited=False)
    assert (killed, found.evidence, found.limit_mib) == ([], "", 6_000)
    killed, found = await watched([6_000, 6_300, 9_000], [0, 4_096], limited=False)
    assert set(killed) == {KEY}
    assert found.evidence == (
        "stopped by its node: it held 9000 MiB of a shared GPU, after 6000 alone, and was promised 4096"
    )
    assert found.limit_mib == 6_000
    for first in (3_000, 0):
        killed, found = await watched([first, 6_000], [0, 4_096], limited=False)
        assert killed, "it held less than it was promised, which is its limit then"
        assert found.limit_mib == 4_096


@virtually
async def test_a_member_that_starts_before_its_companion_keeps_to_its_promise() -> None:
    """Both were placed in one record; its companion's program runs some ticks later. It knew its limit."""
    killed, found = await watched([6_000], [0, 0, 4_096])
    assert set(killed) == {KEY}
    assert (found.evidence.rpartition(": ")[2], found.limit_mib) == (
        "it held 6000 MiB of a shared GPU, and was promised 4096",
        4_096,
    )


@virtually
async def test_a_member_that_is_left_alone_is_no_longer_watched() -> None:
    """Its companions end before it has been beyond its promise twice; it may have the GPU, and when others
    come keeps what it has then."""
    killed, found = await watched([4_000, 6_000], [4_096, 4_096, 0])
    assert (killed, found.evidence, found.limit_mib) == ([], "", 0)
    killed, found = await watched([6_000, 12_000], [4_096, 0, 4_096])
    assert (killed, found.limit_mib) == ([], 12_000)


def test_a_member_that_ran_out_by_itself_ends_with_the_limit_that_its_frameworks_had() -> None:
    """An allocation fails in PyTorch, limited since its start. Its companions have ended meanwhile: it is
    still the limit and not the GPU that was too small."""
    found = Exit(
        started_ms=1,
        exited_ms=2,
        exit_code=1,
        signal=None,
        cpu_ms=1,
        max_rss_kib=1,
        exhausted=("gpu_memory", "torch.OutOfMemoryError"),
    )
    limits = [
        outcome.gpu_memory_limit_mib
        for order, limit_mib in ((member_order("job-1.1.0"), 0), (member_order(), 0), (member_order(), 6_000))
        if (outcome := outcome_of(found, order, limit_mib=limit_mib)) is not None
    ]
    assert limits == [4_096, 0, 6_000]
