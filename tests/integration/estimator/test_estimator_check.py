"""The models that are kept, and whether the very one of then says the same again: from the ledger, the store
and the gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import msgspec
import pytest

from penstock.cli.app import run as penstock
from penstock.log.port import Message, Partition
from penstock.model.inputs.estimates import JobEstimated, ModelTrained
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import as_written
from penstock.model.wire.envelope import Envelope, from_wire, to_wire
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.store import estimator_schema
from tests.integration.estimator.test_estimator_service import serving
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.gateway.gateway_cell import Cell, problem, running
from tests.support.waiting import await_until
from tests.unit.estimator.month import month

pytestmark = pytest.mark.postgres

JOBS = 70  # enough for a first model
SPEC = JobSpec(owner="guest", command=("python", "new.py"), model="bert", batch_size=24)


class LearnedCell:
    """A cell with a month behind it, its gateway, and its estimator, whose answers the placer takes into the
    ledger."""

    def __init__(self, cell: Cell, placer: CellDriver) -> None:
        self.cell, self.placer = cell, placer
        self._sent = self._asked = 0

    async def send(self) -> None:
        """What the placer has decided, in the log and in the read models."""
        fresh = self.placer.values[self._sent :]
        self._sent = len(self.placer.values)
        await self.cell.log.inner.append([Message(Partition(Topic.LEDGER, 0), value) for value in fresh])

        async def projected() -> bool:
            self.cell.look_at_services()
            return bool((await self.get("/v1/status"))["projected_seq"] >= self._sent)

        await await_until(projected, f"record {self._sent} in the read models")

    async def get(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.cell.http.get(path)).json()
        return found

    async def event(self, kind: type, **begins: str) -> Any:
        """The first such event of the estimator whose fields begin so."""
        reader = self.cell.log.inner.reader({Partition(Topic.ESTIMATES, 0): 0})
        try:
            while True:
                for record in await reader.read():
                    data = from_wire(record.headers, record.value, Topic.ESTIMATES).data
                    if isinstance(data, kind) and all(
                        getattr(data, name).startswith(start) for name, start in begins.items()
                    ):
                        return data
        finally:
            await reader.close()

    async def estimated(self, spec: JobSpec = SPEC) -> tuple[str, Estimate]:
        """Submitted at the door, estimated by the service, and queued by the placer."""
        answer = await self.cell.http.post("/v1/jobs", json=as_written(spec))
        job_id = answer.json()["job_id"]
        found: Estimate = (await self.event(JobEstimated, job_id=job_id)).estimate
        self.placer.submit(job_id, spec, found)
        await self.send()
        return job_id, found

    async def knows(self, version: str) -> bool:
        """Whether both models answer by now: a job that no placer hears of is estimated."""
        self._asked += 1
        job_id = f"asked-{self._asked}"
        event = JobSubmitted(job_id=job_id, spec=msgspec.structs.replace(SPEC, iterations=7_000))
        headers, value = to_wire(Envelope(f"submit-{job_id}", "/test", 1_000, event))
        await self.cell.log.inner.append([Message(Partition(Topic.JOBS, 0), value, headers)])
        found: Estimate = (await self.event(JobEstimated, job_id=job_id)).estimate
        return found.tier == "model" and version in found.source

    async def penstock(self, *arguments: str) -> int:
        """The command as somebody types it, in this process; its exit code."""
        return await asyncio.to_thread(penstock, ["--server", self.cell.url, *arguments])

    async def check(self, job_id: str) -> dict[str, Any]:
        return await self.get(f"/v1/jobs/{job_id}/estimate/check")


@asynccontextmanager
async def learned(dsn: str) -> AsyncIterator[LearnedCell]:
    settings = Settings(log_url=dsn, dsn=dsn)
    async with running(dsn) as cell:
        predicted = LearnedCell(cell, month(JOBS))
        read_before = (
            len(predicted.placer.values) + 100
        )  # the ledger says that the placer has read so many submissions
        await cell.log.inner.append([Message(Partition(Topic.JOBS, 0), b"from before")] * read_before)
        await predicted.send()
        async with serving(cell.log.inner, settings):
            await predicted.event(ModelTrained, model_version="resources")
            steps = (await predicted.event(ModelTrained, model_version="steps")).model_version
            await await_until(
                lambda: predicted.knows(steps), "both models to answer"
            )  # told first, used then
            yield predicted


async def statement(dsn: str, text: str) -> None:
    connection = await asyncpg.connect(dsn, server_settings={"search_path": estimator_schema("default")})
    await connection.execute(text)
    await connection.close()


async def test_a_job_is_estimated_again_by_the_model_of_then(
    dsn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An auditor asks a month later: did this number really come from that model? By then the cell has other
    cards."""
    async with learned(dsn) as predicted:
        job_id, estimate = await predicted.estimated()
        assert estimate.tier == "model"
        predicted.placer.join(node_spec("node-9", 8, model="T4", memory_mib=40_000))
        await predicted.send()
        found = await predicted.check(job_id)
        assert found["ok"] is True, found
        [model] = found["models"]
        assert (model["verdict"], model["version"]) == ("same", estimate.model_version)
        memory = model["fields"]["gpu_memory_mib"]
        assert memory["then"] == memory["now"] == estimate.worker.gpu_memory_mib

        later, on_the_new_card = await predicted.estimated(msgspec.structs.replace(SPEC, gpu_models=("T4",)))
        assert "MiB on T4" in on_the_new_card.source
        found = await predicted.check(later)
        assert found["ok"] is True, found
        assert found["models"][0]["as_of"] == found["estimated_seq"], "earlier, nobody knew that card"

        both, estimate = await predicted.estimated(msgspec.structs.replace(SPEC, iterations=7_000))
        found = await predicted.check(both)
        assert found["ok"] is True, found
        resources, steps = found["models"]
        assert (resources["version"], steps["version"][:6]) == (estimate.model_version, "steps-")
        assert steps["fields"]["run_ms"]["now"] == estimate.run_ms

        assert await predicted.penstock("estimator", "check", both) == 0
        again = f"✓ {steps['version']} predicts the same again: run_ms {estimate.run_ms}"
        assert again in capsys.readouterr().out
        assert await predicted.penstock("estimator", "models") == 0
        listed = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in listed] == ["VERSION", resources["version"], steps["version"]]
        assert all("in use" in line and "whole" in line for line in listed[1:])

        asked = msgspec.structs.replace(
            SPEC, resources=msgspec.structs.replace(SPEC.resources, gpu_memory_mib=9_999)
        )
        his_own, _ = await predicted.estimated(asked)
        found = await predicted.check(his_own)
        assert found["ok"] is True
        assert "gpu_memory_mib" not in found["models"][0]["fields"], "that number is the user's"


async def test_what_the_model_did_not_say_is_found_out(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers in the ledger that no model ever told, a model that was changed or is gone, and jobs without
    any."""
    async with learned(dsn) as predicted:
        job_id, estimate = await predicted.estimated()
        more = msgspec.structs.replace(estimate.worker, gpu_memory_mib=estimate.worker.gpu_memory_mib + 1)
        predicted.placer.submit("forged", SPEC, msgspec.structs.replace(estimate, worker=more))
        other = JobSpec(owner="guest", command=("python", "x.py"))
        predicted.placer.submit(
            "unknown",
            other,
            msgspec.structs.replace(estimate, tier="default", source="default", model_version=None),
        )
        await predicted.send()
        forged = await predicted.check("forged")
        assert (forged["ok"], forged["models"][0]["verdict"]) == (False, "differs")
        assert (
            f"gpu_memory_mib {more.gpu_memory_mib} then and {estimate.worker.gpu_memory_mib} now"
            in forged["text"]
        )
        assert await predicted.penstock("estimator", "check", "forged") == 1, "a pipeline can rely on it"
        assert "✗" in capsys.readouterr().out
        none = await predicted.check("unknown")
        assert (none["ok"], none["models"]) == (None, [])
        assert "No model was asked" in none["text"]
        problem(await predicted.cell.http.get("/v1/jobs/nobody/estimate/check"), 404)

        row, steps = (await predicted.get("/v1/estimator/models"))["models"]
        assert (steps["kind"], steps["in_use"], steps["whole"]) == ("steps", True, True)
        assert (row["version"], row["kind"], row["in_use"], row["whole"]) == (
            estimate.model_version,
            "resources",
            True,
            True,
        )
        assert row["runs"] <= JOBS
        assert row["metrics"]["error"] > 0
        await statement(dsn, "UPDATE models SET body = set_byte(body, length(body) - 1, 7)")
        row, steps = (await predicted.get("/v1/estimator/models"))["models"]
        assert not steps["whole"]
        assert (row["in_use"], row["whole"]) == (False, False)
        assert "digest does not match" in row["damage"]
        damaged = await predicted.check(job_id)
        assert (damaged["ok"], damaged["models"][0]["verdict"]) == (False, "damaged")
        await statement(dsn, "DELETE FROM models")
        gone = await predicted.check(job_id)
        assert (gone["ok"], gone["models"][0]["verdict"]) == (False, "not_stored")
        assert "no longer stored" in gone["text"]
        assert (await predicted.get("/v1/estimator/models"))["models"] == []


async def test_before_the_estimator_ever_ran_there_is_no_model(dsn: str) -> None:
    """A fresh installation: an empty list, no error. A job that nobody has estimated yet cannot be
    checked."""
    async with running(dsn) as cell:
        assert (await cell.http.get("/v1/estimator/models")).json() == {"ok": True, "models": []}
        accepted = await cell.http.post("/v1/jobs", json={"command": ["true"]})
        body = problem(await cell.http.get(f"/v1/jobs/{accepted.json()['job_id']}/estimate/check"), 409)
        assert "no estimate" in body["detail"]
