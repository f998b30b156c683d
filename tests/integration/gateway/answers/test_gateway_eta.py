"""`GET /v1/jobs/ID/eta` over real HTTP: words of the estimator as the placer committed them, the latest one
counts."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from penstock.cli.app import run as penstock
from penstock.client import AsyncClient
from penstock.clock import wall_ms
from penstock.model.inputs.estimates import Bounds, EtaEstimated, StagesProfiled
from penstock.model.jobs.job_spec import JobSpec
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, problem, running

pytestmark = pytest.mark.postgres


HOUR_MS = 3_600_000
"""More than a run of all tests takes: what is expected in months does not tell one moment of it from
another."""
LEFT_MS = 10_000 * HOUR_MS


@pytest_asyncio.fixture
async def cell(dsn: str) -> AsyncIterator[Cell]:
    async with running(dsn) as found:
        yield found


def word(done: int, left_ms: float) -> EtaEstimated:
    left = Bounds(middle=left_ms, low=0.9 * left_ms, high=1.2 * left_ms)
    steps = Bounds(middle=10_000 - done, low=10_000 - done, high=10_000 - done)
    return EtaEstimated(
        job_id="runs",
        attempt=1,
        at_ms=wall_ms(),
        done=done,
        left_ms=left,
        steps=steps,
        step_ms=Bounds(middle=1, low=1, high=1),
        level=0.9,
        source="iterations asked for",
    )


def without_times(start: dict[str, Any] | None) -> object:
    """Of an expected start what two questions one after the other agree on to the letter."""
    if start is None:
        return None
    holders = [holder["job_id"] for holder in start["holders"]]
    return start["starts_ms"] is None, start["unknown"], start["assumes"], holders


async def test_remaining_time_of_each_kind_of_job(cell: Cell) -> None:
    """One reported twice, one reported nothing, one waits, one has ended; a listing has the same of those
    that run."""
    placer = cell.placer
    placer.now_ms = wall_ms()
    placer.join(node_spec("n0", 2))
    placer.run(["done"])
    for job_id in ("runs", "silent"):
        placer.submit(job_id)
        placer.start(job_id)
    placer.submit("waits", gpus=2)
    placer.submit("small")
    placer.feed(word(1_000, 15 * LEFT_MS))
    placer.feed(word(5_000, LEFT_MS))
    await cell.tell()
    await cell.caught_up()
    found = (await cell.http.get("/v1/jobs/runs/eta")).json()
    assert (found["answer"], found["due"], found["done"]) == ("reported", "later", 5_000)
    assert 0.5 <= found["share"] <= 1
    assert LEFT_MS - HOUR_MS < found["left_ms"]["middle"] <= LEFT_MS
    assert found["ends_ms"]["high"] == pytest.approx(wall_ms() + 1.2 * LEFT_MS, abs=HOUR_MS)
    answers = {
        job_id: (await cell.http.get(f"/v1/jobs/{job_id}/eta")).json()
        for job_id in ("silent", "waits", "done")
    }
    assert {job_id: (answer["answer"], answer["left_ms"]) for job_id, answer in answers.items()} == {
        "silent": ("unknown", None),
        "waits": ("waiting", None),
        "done": ("ended", None),
    }
    assert answers["done"]["outcome"] == "succeeded"
    listed = (await cell.http.get("/v1/jobs?eta=true")).json()["jobs"]
    assert {job["job_id"]: job["eta"] and job["eta"]["answer"] for job in listed} == {
        "runs": "reported",
        "silent": "unknown",
        "waits": None,
        "small": None,
        "done": None,
    }
    assert "eta" not in (await cell.http.get("/v1/jobs")).json()["jobs"][0], "only who asks pays for it"
    starts = {
        job_id: (await cell.http.get(f"/v1/jobs/{job_id}/why")).json()["start"]
        for job_id in ("waits", "small", "runs", "done")
    }
    assert (starts["runs"], starts["done"]) == (None, None)
    assert starts["waits"]["starts_ms"] is None
    assert starts["waits"]["unknown"] == "the remaining time of 1 of 2 running jobs is not known"
    assert starts["small"]["starts_ms"] == pytest.approx(found["ends_ms"]["middle"], abs=HOUR_MS)
    assert "end as estimated" in starts["small"]["assumes"]
    holders = starts["small"]["holders"]
    assert [(row["job_id"], row["gpus"]) for row in holders] == [("runs", 1), ("silent", 1)]
    assert (holders[0]["ends_ms"], holders[1]["ends_ms"]) == (starts["small"]["starts_ms"], None)
    for job_id, start in starts.items():
        asked = (await cell.http.get(f"/v1/jobs/{job_id}/eta")).json()["start"]
        assert without_times(asked) == without_times(start), "why and eta give one answer"
        if start is not None and start["starts_ms"] is not None:
            assert abs(asked["starts_ms"] - start["starts_ms"]) < HOUR_MS
    async with AsyncClient(cell.url) as client:
        assert (await client.eta("small")).start is not None
        now, past = await client.why("small"), await client.why("small", at_ms=placer.now_ms)
    assert now.start is not None
    assert [holder.job_id for holder in now.start.holders] == ["runs", "silent"]
    assert (past.seq, past.start) == (now.seq, None)
    problem(await cell.http.get("/v1/jobs/nobody/eta"), 404)
    problem(await cell.http.get("/v1/jobs?eta=perhaps"), 400)


async def test_describe_shows_what_an_iteration_of_such_a_job_uses(
    cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs of this network and batch size were profiled; `describe` of the next one shows it while it
    lives."""
    placer = cell.placer
    placer.join(node_spec("n0", 2))
    placer.feed(
        StagesProfiled(
            model="resnet50",
            batch_size=64,
            gpus=1,
            storage_ms=6.5,
            cpu_ms=12.0,
            gpu_ms=1_038.25,
            network_ms=4.25,
            idle_ms=0.0,
            iteration_ms=1_061.0,
            iterations=20,
        )
    )
    spec = JobSpec(command=("true",), model="resnet50", batch_size=64)
    placer.submit("runs", spec=spec)
    placer.start("runs")
    placer.submit("other", spec=JobSpec(command=("true",)))
    await cell.tell()
    await cell.caught_up()
    found = (await cell.http.get("/v1/jobs/runs")).json()["stages"]
    assert (found["gpu_ms"], found["iterations"]) == (1_038.25, 20)
    assert (await cell.http.get("/v1/jobs/other")).json()["stages"] is None
    assert await asyncio.to_thread(penstock, ["--server", cell.url, "describe", "job", "runs"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "Iteration 1,061.0 ms: storage 6.5, CPU 12.0, GPU 1,038.2, network 4.2, idle 0.0; of 20 iterations of"
        in text
    )
    placer.finish("runs")
    await cell.tell()
    await cell.caught_up()
    assert (await cell.http.get("/v1/jobs/runs")).json()["stages"] is None
