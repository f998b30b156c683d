"""The Python client asks a running job for a checkpoint and gives it other cores, against a real gateway."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest

from penstock.client import AsyncClient, Checkpoint, Client, Conflict, TaskCores
from penstock.model.decisions.adjustments import TaskAdjusted
from penstock.model.inputs.external_events import TaskCheckpointed
from penstock.model.inputs.saves import SaveRefused
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.event import Event
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope
from tests.integration.client import test_client
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, patient
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
cell = test_client.cell


@pytest.fixture(autouse=True)
def patient_gateway() -> Iterator[None]:
    with patient():
        yield


async def asked(cell: Cell, topic: Topic, count: int = 1) -> Event:
    """What the gateway has written for a request."""

    async def written() -> list[Envelope]:
        found = await cell.written(topic)
        return found if len(found) >= count else []

    return (await await_until(written, "the gateway's event"))[-1].data


async def train(cell: Cell) -> None:
    cell.placer.join(node_spec("n0", 2))
    cell.placer.submit("train", spec=JobSpec(command=("true",), name="nightly", checkpoint="sdk"))
    await cell.tell()
    await cell.caught_up()


async def test_a_notebook_asks_for_a_checkpoint_and_gets_it(cell: Cell) -> None:
    """Before an upgrade; the job is named. While it is not running yet the answer is an error, and nothing
    was asked; and so where no process of it saves."""
    await train(cell)
    async with AsyncClient(cell.url) as client:
        with pytest.raises(Conflict, match="nothing was asked") as early:
            await client.checkpoint("nightly")
        assert early.value.kind == "not_running"
        cell.placer.start("train")
        await cell.tell()
        await cell.caught_up()
        asking = asyncio.create_task((await client.handle("nightly")).checkpoint("before the upgrade"))
        cell.placer.feed(await asked(cell, Topic.JOBS))
        job = cell.placer.state.jobs["train"]
        cell.placer.feed(
            TaskCheckpointed(
                node_id="n0",
                task_id="train.1.w0",
                token=job.token,
                at_ms=5,
                path="/c/i9",
                iteration=9,
                size_bytes=7,
                save_ms=250,
            )
        )
        await cell.tell()
        assert await asking == Checkpoint(
            path="/c/i9",
            iteration=9,
            node_id="n0",
            attempt=1,
            at_ms=cell.placer.now_ms,
            save_ms=250,
            size_bytes=7,
            shared=False,
            usual_save_ms=250.0,
        )
        asking = asyncio.create_task(client.checkpoint("nightly"))
        cell.placer.feed(await asked(cell, Topic.JOBS, 2))
        refused = SaveRefused(
            node_id="n0", task_id="train.1.w0", token=job.token, at_ms=6, reason="no process saves"
        )
        cell.placer.feed(refused)
        await cell.tell()
        with pytest.raises(Conflict, match="no process saves") as nobody:
            await asking
        assert nobody.value.kind == "not_saved"


async def test_a_script_of_an_operator_gives_a_running_job_other_cores(cell: Cell) -> None:
    """By the client without an event loop. More than the node has are refused, and nothing is changed."""
    await train(cell)
    cell.placer.start("train")
    await cell.tell()
    await cell.caught_up()

    async def threaded(ask: Callable[[Client], object]) -> object:
        return await asyncio.to_thread(lambda: ask(Client(cell.url)))

    with pytest.raises(Conflict, match="nothing was changed"):
        await threaded(lambda client: client.cores("nightly", 33))
    asking: Awaitable[object] = asyncio.create_task(
        threaded(lambda client: client.handle("nightly").cores(4, task="w0", reason="its loader starves"))
    )
    cell.placer.feed(await asked(cell, Topic.PROPOSALS))
    job = cell.placer.state.jobs["train"]
    task = job.tasks["train.1.w0"]
    assert task.cores.adjusted is not None
    cell.placer.feed(
        TaskAdjusted(
            node_id="n0",
            task_id="train.1.w0",
            token=job.token,
            order_token=task.cores.adjusted.token,
            what="cores",
            enforced="cpuset",
        )
    )
    await cell.tell()
    expected = TaskCores(task_id="train.1.w0", cores=task.place.cores, applied=True, enforced="cpuset")
    assert len(expected.cores) == 4
    assert await asking == (expected,)
