"""Two real node-reporters with folders of their own: a job that starts again on the other node fetches its
checkpoint, or begins anew."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest

from infra.codegen.schemas import ROOT
from penstock.model.decisions.orders import CheckpointSource, HandOverCheckpoint, StartTask, StopTask
from penstock.model.inputs.external_events import (
    CheckpointFetched,
    NodeJoined,
    TaskCheckpointed,
    TaskExited,
    TaskStarted,
)
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.node_reporter.options import Options
from penstock_services.node_reporter.shell.checkpoints import checkpoint_fetch
from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import asks
from tests.support.log.memory_log import MemoryBroker, MemoryLog
from tests.support.node_reporter import node_fixtures
from tests.support.node_reporter.node_cell import (
    Cell,
    end_tasks,
    node_options,
    printed,
    start_order,
    story,
    working,
)
from tests.support.story import told
from tests.support.trainings.loss_file import check_losses, rows
from tests.support.waiting import await_until

broker, cell = node_fixtures.broker, node_fixtures.cell

JOB = "job-1"
LOSSES = "losses"
TRAIN = """
import json, os, pathlib, sys, time
from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
losses = pathlib.Path(sys.argv[1])
state = {"done": 0, "weight": 1.0}
def save(path):
    pathlib.Path(path, "deep").mkdir()
    pathlib.Path(path, "deep", "state.json").write_text(json.dumps(state))
    pathlib.Path(path, "zeros").write_bytes(bytes(3_000_000))
    pathlib.Path(path, "latest").symlink_to("deep/state.json")
def restore(path):
    state.update(json.loads(pathlib.Path(path, "latest").read_text()))
print("restored" if checkpoint(save, restore) else "fresh", state["done"], flush=True)
while True:
    state["weight"] -= 0.01 * state["weight"]
    state["done"] += 1
    with losses.open("a") as file:
        print(os.environ["PENSTOCK_ATTEMPT"], state["done"], state["weight"] ** 2, file=file)
    time.sleep(0.002)
    progress(state["done"])
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Options]]:
    """n1 and n2; no process of theirs is left afterwards."""
    key = tmp_path / "logs.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(32))
    found = [node_options(tmp_path / name, node_id=name, log_key=key) for name in ("n1", "n2")]
    with told("the nodes' last events, and their tasks' output", lambda: "\n".join(map(story, found))):
        yield found
    for options in found:
        end_tasks(options)


@pytest.fixture
async def both(
    nodes: list[Options], broker: MemoryBroker, cell: Cell
) -> AsyncIterator[dict[str, NodeJoined]]:
    """Their joinings, by node; both are at work."""
    async with AsyncExitStack() as stack:
        for options in nodes:
            await stack.enter_async_context(working(options, MemoryLog(broker, options.node_id)))
        yield await joined(cell)


async def joined(cell: Cell, count: int = 2) -> dict[str, NodeJoined]:
    await cell.until(NodeJoined, count=count)
    return {event.node.node_id: event for event in cell.events(NodeJoined) if isinstance(event, NodeJoined)}


def start(token: int, attempt: int, node: str, folder: Path, **more: object) -> StartTask:
    return start_order(
        token,
        sys.executable,
        "-c",
        TRAIN,
        str(folder / LOSSES),
        node_id=node,
        task_id=f"{JOB}.{attempt}.w0",
        job_id=JOB,
        attempt=attempt,
        env={"PYTHONPATH": str(ROOT / "libs")},
        **{"checkpoint": "", **more},
    )


def source(node: NodeJoined, size_bytes: int = 0) -> CheckpointSource:
    assert node.node.logs is not None
    assert node.public_key is not None
    return CheckpointSource(
        node_id=node.node.node_id,
        address=node.node.address,
        port=node.node.logs.port,
        public_key=node.public_key,
        size_bytes=size_bytes,
    )


def hand_over(token: int, attempt: int, to: NodeJoined, node: str = "n1") -> HandOverCheckpoint:
    assert to.public_key is not None
    return HandOverCheckpoint(
        token=token,
        node_id=node,
        job_id=JOB,
        attempt=attempt,
        to_node=to.node.node_id,
        public_key=to.public_key,
    )


def stop_on(node: str, token: int, attempt: int) -> StopTask:
    return StopTask(token=token, node_id=node, task_id=f"{JOB}.{attempt}.w0", grace_ms=20_000, reason="moved")


async def saved_on_n1(cell: Cell, folder: Path) -> TaskCheckpointed:
    """Attempt 1 trains there, and is stopped."""
    await cell.order(start(1, 1, "n1", folder))
    await await_until(lambda: len(rows(folder / LOSSES)) > 10, "ten iterations")
    await cell.order(stop_on("n1", 2, 1))
    await cell.until(TaskExited)
    found = await cell.until(TaskCheckpointed)
    assert isinstance(found, TaskCheckpointed)
    return found


def greeting(options: Options, attempt: int) -> str:
    return printed(options, JOB, f"{JOB}.{attempt}.w0").partition("\n")[0]


def left_over(options: Options) -> list[str]:
    """What a fetch would leave behind that did not end well."""
    return [path.name for path in (options.state_dir / "checkpoints").glob(".*")]


async def test_a_job_goes_on_at_its_checkpoint_on_another_node(
    cell: Cell, nodes: list[Options], both: dict[str, NodeJoined], tmp_path: Path
) -> None:
    """The order to hand it over is read a moment after the request: the network is not in order. Then the job
    goes back, by the same way."""
    saved = await saved_on_n1(cell, tmp_path)
    name = Path(saved.path).name
    await cell.order(
        start(3, 2, "n2", tmp_path, checkpoint=name, checkpoint_from=source(both["n1"], saved.size_bytes))
    )
    await asyncio.sleep(0.1)  # clock: either order may be read first; this one is so nearly always
    await cell.order(hand_over(3, 2, both["n2"]))
    fetched = await cell.until(CheckpointFetched)
    assert (fetched.problem, fetched.from_node, fetched.iteration) == ("", "n1", saved.iteration)
    assert fetched.path == str(nodes[1].state_dir / f"checkpoints/{JOB}/{name}")
    assert fetched.size_bytes == saved.size_bytes > 3_000_000
    await await_until(
        lambda: greeting(nodes[1], 2) == f"restored {saved.iteration}", lambda: greeting(nodes[1], 2)
    )
    assert left_over(nodes[1]) == []
    await cell.order(stop_on("n2", 4, 2))
    again = await cell.until(TaskCheckpointed, count=2)
    await cell.until(TaskExited, count=2)
    await cell.order(hand_over(5, 3, both["n1"], "n2"))
    await cell.order(
        start(5, 3, "n1", tmp_path, checkpoint=Path(again.path).name, checkpoint_from=source(both["n2"]))
    )
    await await_until(
        lambda: greeting(nodes[0], 3) == f"restored {again.iteration}", lambda: greeting(nodes[0], 3)
    )
    await await_until(lambda: rows(tmp_path / LOSSES)[-1][0] == 3, "attempt 3 to train")
    check_losses(tmp_path / LOSSES)


async def test_a_later_attempt_that_began_before_the_latest_checkpoint_is_no_substitute_for_it(
    cell: Cell, nodes: list[Options], both: dict[str, NodeJoined], tmp_path: Path
) -> None:
    """Twice a reporter died with a task that had just saved. So attempt 2 on n2 began where the ledger knew
    of, saved 3 iterations, and nobody heard of it; what attempt 1 had saved on n1 is known by now."""
    saved = await saved_on_n1(cell, tmp_path)
    name = Path(saved.path).name
    assert saved.iteration > 3
    stale = nodes[1].state_dir / f"checkpoints/{JOB}/attempt-2-iteration-3"
    stale.mkdir(parents=True)
    await cell.order(hand_over(3, 3, both["n2"]))
    await cell.order(
        start(3, 3, "n2", tmp_path, checkpoint=name, checkpoint_from=source(both["n1"], saved.size_bytes))
    )
    fetched = await cell.until(CheckpointFetched)
    assert (fetched.problem, fetched.iteration) == ("", saved.iteration)
    assert fetched.path == str(stale.parent / name)
    await await_until(
        lambda: greeting(nodes[1], 3) == f"restored {saved.iteration}", lambda: greeting(nodes[1], 3)
    )
    await await_until(lambda: rows(tmp_path / LOSSES)[-1][0] == 3, "attempt 3 to train")
    check_losses(tmp_path / LOSSES)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_fetch, "PATIENCE_S", 0.5)


@pytest.mark.usefixtures("impatient")
async def test_a_job_whose_old_node_is_gone_begins_anew_and_the_reason_is_reported(
    cell: Cell, nodes: list[Options], broker: MemoryBroker, tmp_path: Path
) -> None:
    """The machine is switched off between the decision and the fetch. Nothing waits longer than the bound,
    nothing is left behind."""
    async with working(nodes[0], MemoryLog(broker, "n1")):
        saved = await saved_on_n1(cell, tmp_path)
    name = Path(saved.path).name
    async with working(nodes[1], MemoryLog(broker, "n2")):
        old = source((await joined(cell))["n1"])
        await cell.order(start(3, 2, "n2", tmp_path, checkpoint=name, checkpoint_from=old))
        fetched = await cell.until(CheckpointFetched)
        assert "node n1 at 127.0.0.1 does not answer" in fetched.problem
        assert (fetched.path, fetched.iteration) == ("", None)
        await await_until(lambda: greeting(nodes[1], 2) == "fresh 0", lambda: greeting(nodes[1], 2))
        assert left_over(nodes[1]) == []
        await cell.until(TaskStarted, task_id=f"{JOB}.2.w0")
        whole = [type(event) for event in cell.events()]
        assert whole[whole.index(CheckpointFetched) + 1 :].count(TaskStarted) == 1, (
            "it is reported before the start"
        )


@pytest.mark.parametrize("reported", [4_000_000, 0])
async def test_a_checkpoint_beyond_the_limit_is_not_fetched(
    cell: Cell, nodes: list[Options], broker: MemoryBroker, tmp_path: Path, reported: int
) -> None:
    """The script reports its size, or does not: then the old node says it. The remedy is named."""
    small = replace(nodes[1], checkpoint_fetch_limit_mib=1)
    async with working(nodes[0], MemoryLog(broker, "n1")), working(small, MemoryLog(broker, "n2")):
        both = await joined(cell)
        saved = await saved_on_n1(cell, tmp_path)
        await cell.order(hand_over(3, 2, both["n2"]))
        name = Path(saved.path).name
        await cell.order(
            start(3, 2, "n2", tmp_path, checkpoint=name, checkpoint_from=source(both["n1"], reported))
        )
        fetched = await cell.until(CheckpointFetched)
        assert "this node fetches 1 at most; raise --checkpoint-fetch-limit" in fetched.problem
        await await_until(lambda: greeting(nodes[1], 2) == "fresh 0", lambda: greeting(nodes[1], 2))


async def test_a_disk_without_room_is_spared(
    cell: Cell,
    nodes: list[Options],
    both: dict[str, NodeJoined],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others on the node need what is left."""
    saved = await saved_on_n1(cell, tmp_path)
    monkeypatch.setattr(checkpoint_fetch, "RESERVE_BYTES", 1 << 60)
    await cell.order(hand_over(3, 2, both["n2"]))
    name = Path(saved.path).name
    await cell.order(start(3, 2, "n2", tmp_path, checkpoint=name, checkpoint_from=source(both["n1"])))
    fetched = await cell.until(CheckpointFetched)
    assert f"are free in {nodes[1].state_dir}/checkpoints" in fetched.problem
    assert "make room there" in fetched.problem


async def test_a_job_that_is_stopped_while_its_checkpoint_comes_waits_for_nothing(
    cell: Cell,
    nodes: list[Options],
    both: dict[str, NodeJoined],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old node accepts the connection and says nothing. The exit is reported at once, and other tasks
    start meanwhile."""
    monkeypatch.setattr(checkpoint_fetch, "PATIENCE_S", 3_600)
    silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    held = msgspec.structs.replace(source(both["n1"]), port=port)
    await cell.order(start(3, 2, "n2", tmp_path, checkpoint="attempt-1-iteration-9", checkpoint_from=held))
    await cell.order(start_order(4, "true", node_id="n2", gpus=(1,)))
    await cell.until(TaskExited, task_id="job-4.1.0")
    await cell.order(stop_on("n2", 5, 2))
    exited = await cell.until(TaskExited, task_id=f"{JOB}.2.w0")
    assert exited.cause == "stopped"
    assert cell.events(CheckpointFetched) == []
    silent.close()


async def test_nobody_gets_a_checkpoint_whom_the_ledger_has_not_placed_there(
    cell: Cell, both: dict[str, NodeJoined], tmp_path: Path
) -> None:
    """A stolen machine of the cell asks for a job that is not its own: without an order, with its own key,
    with a changed request, for a later attempt's."""
    saved = await saved_on_n1(cell, tmp_path)
    right, wrong = NodeKeys(b"r" * 32), NodeKeys(b"w" * 32)
    old = source(both["n1"])

    async def ask(keys: NodeKeys, signed: str, sent: str | None = None) -> "httpx.Response":
        proof = f"Penstock {keys.sign(asks('n1', signed)).decode()}"
        async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
            url = f"http://127.0.0.1:{old.port}/v1/checkpoint?{sent or signed}"
            return await client.get(url, headers={"Authorization": proof})

    query = f"job={JOB}&token=3&after={Path(saved.path).name}"
    assert (await ask(right, query)).status_code == 403
    order = msgspec.structs.replace(hand_over(3, 2, both["n2"]), public_key=right.public_key)
    await cell.order(order, start_order(4, "true"))
    await cell.until(TaskExited, task_id="job-4.1.0")
    answered = await ask(right, query)
    assert answered.status_code == 200
    assert answered.headers["penstock-checkpoint"] == Path(saved.path).name
    for answer in (
        await ask(wrong, query),
        await ask(right, query, query.replace(JOB, "job-2")),
        await ask(right, query.replace("token=3", "token=2")),
        await ask(right, query, query + "&x"),
    ):
        assert answer.status_code == 403, answer.text
    assert (await ask(right, f"job={JOB}&token=3&after=..")).status_code == 400
    older = query.replace("attempt-1", "attempt-7")
    assert (await ask(right, older)).status_code == 404
    first = msgspec.structs.replace(order, token=5, attempt=1)
    await cell.order(first, start_order(6, "true"))
    await cell.until(TaskExited, task_id="job-6.1.0")
    assert (await ask(right, query.replace("token=3", "token=5"))).status_code == 404
