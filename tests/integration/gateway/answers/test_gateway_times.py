"""Over real HTTP: times count on while the ledger rests, by the ledger's clock; a shared GPU shows each of
its jobs."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.cli.app import run as penstock
from penstock.cli.queries.tables import clock
from penstock.clock import wall_ms
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate, ResourceVector
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

HOUR_MS = 3_600_000
STEP_MS = 100  # so much must pass on every answer while no record is written


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


def place(cell: Cell, job_id: str, worker: ResourceVector, run_ms: int | None = None) -> None:
    """Submits the job with these needs."""
    cell.placer.feed(JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",))))
    need = Estimate(worker=worker, confidence=1.0, tier="user", source="a test", run_ms=run_ms)
    cell.placer.feed(JobEstimated(job_id=job_id, estimate=need))


async def answers(cell: Cell) -> dict[str, dict[str, Any]]:
    paths = {
        "why": "/v1/jobs/waits/why",
        "queue": "/v1/queue",
        "eta": "/v1/jobs/runs/eta",
        "job": "/v1/jobs/runs",
        "jobs": "/v1/jobs",
        "tasks": "/v1/jobs/runs/tasks",
        "ended": "/v1/jobs/done/eta",
    }
    return {name: (await cell.http.get(path)).json() for name, path in paths.items()}


async def shown(cell: Cell, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What `penstock …` prints for people."""
    assert await asyncio.to_thread(penstock, ["--server", cell.url, *arguments]) == 0
    return capsys.readouterr().out


async def test_times_count_on_while_no_record_is_written(
    cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet cell: the ledger's latest record grows old, and jobs wait and run on. Its clock is not this
    machine's."""
    placer = cell.placer
    placer.now_ms = wall_ms() - 5 * HOUR_MS
    placer.join(node_spec("n0", 1))
    placer.run(["done"])
    place(cell, "runs", ResourceVector(gpus=1), run_ms=HOUR_MS)
    placer.start("runs")
    placer.submit("waits")
    await cell.tell()
    await cell.caught_up()
    first = await answers(cell)

    async def after_a_step() -> dict[str, dict[str, Any]] | None:
        found = await answers(cell)
        went_on = all(found[name]["now_ms"] >= first[name]["now_ms"] + STEP_MS for name in first)
        return found if went_on else None

    later = await await_until(after_a_step, f"{STEP_MS} ms more in every answer")
    recorded_ms = placer.now_ms
    for found in (first, later):
        why, (queued,) = found["why"], found["queue"]["jobs"]
        assert (why["seq"], why["record_ms"]) == (placer.state.seq, recorded_ms)
        waited_ms = why["now_ms"] - placer.state.jobs["waits"].submitted_ms
        assert why["waited_ms"] == waited_ms
        assert queued["waited_ms"] == found["queue"]["now_ms"] - placer.state.jobs["waits"].submitted_ms
        assert found["queue"]["record_ms"] == recorded_ms
        eta = found["eta"]
        running_ms = placer.state.jobs["runs"].running_ms
        assert running_ms is not None
        assert eta["ran_ms"] == eta["now_ms"] - running_ms
        assert (eta["left_ms"]["middle"], eta["ends_ms"]["middle"]) == (
            HOUR_MS - eta["ran_ms"],
            running_ms + HOUR_MS,
        )
        for name in found:
            assert recorded_ms <= found[name]["now_ms"] < recorded_ms + HOUR_MS, (
                f"{name}: not by the ledger's clock"
            )
    past = (await cell.http.get("/v1/jobs/waits/why", params={"at": placer.state.seq})).json()
    assert past["now_ms"] == past["record_ms"] == recorded_ms, "the past is as of its record"
    await shown_to_people(cell, capsys)


async def shown_to_people(cell: Cell, capsys: pytest.CaptureFixture[str]) -> None:
    """The record is named, and its time; what runs and waits has done so for seconds by any clock."""
    named = f"as of record {cell.placer.state.seq}, {clock(cell.placer.now_ms)}; now "
    for command in (("why", "waits"), ("queue",)):
        text = await shown(cell, capsys, *command)
        assert named in text, text
        if command[0] == "why":
            assert re.search(r"expected start: .+, in \d+[mh].*, if running jobs end as estimated", text), (
                text
            )
            assert re.search(r"runs of \S+ holds 1 GPU, ends about ", text), text
    for command in (("get", "jobs"), ("describe", "job", "runs")):
        text = await shown(cell, capsys, *command)
        assert not re.search(r"\d+[hd] \d", text), f"no hours have passed:\n{text}"
        assert "ran –" not in text


async def test_a_gpu_lists_each_job_on_it_with_its_share(
    cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two notebooks share GPU 0, a training job has GPU 1, GPU 2 is free."""
    cell.placer.join(node_spec("n0", 3))
    half = ResourceVector(gpus=1, gpu_share_milli=500, gpu_memory_mib=4_000, cores=1)
    place(cell, "jone", half)
    place(cell, "jtwo", ResourceVector(gpus=1, gpu_share_milli=250, gpu_memory_mib=2_000))
    place(cell, "train", ResourceVector(gpus=1, gpu_memory_mib=16_000))
    await cell.tell()
    await cell.caught_up()
    listed = (await cell.http.get("/v1/gpus")).json()["gpus"]
    of_node = (await cell.http.get("/v1/nodes/n0")).json()["gpu_list"]
    for gpus in (listed, of_node):
        assert [
            [(held["job_id"], held["share_milli"], held["gpu_memory_mib"]) for held in gpu["holders"]]
            for gpu in gpus
        ] == [
            [("jone", 500, 4_000), ("jtwo", 250, 2_000)],
            [("train", 1_000, 16_000)],
            [],
        ]
        assert [gpu["free_milli"] for gpu in gpus] == [250, 0, 1_000]
    for command in (("get", "gpus"), ("describe", "node", "n0")):
        text = await shown(cell, capsys, *command)
        lines = [line.split() for line in text.splitlines() if line.startswith("n0 ")]
        assert [line[-5:] for line in lines] == [
            ["shared,", "25%", "free", "50%", "jone"],
            ["shared,", "25%", "free", "25%", "jtwo"],
            ["16", "GiB", "used", "100%", "train"],
            ["16", "GiB", "free", "–", "–"],
        ], text
