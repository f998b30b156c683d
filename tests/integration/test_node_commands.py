"""`penstock node cordon | drain | uncordon | fence`: real gateway, projector, placer and Postgres; nodes without processes."""

import asyncio
import json
import os
import pwd
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.cli.app import run as penstock
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.envelope import Envelope, to_wire
from penstock.model.external_events import NodeLeft, NodeSuspected
from penstock.model.topics import Topic
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.placer.shell.service import run as run_placer
from tests.support.driver import node_spec
from tests.support.fake_nodes import FakeNodes
from tests.support.forgeries import GATEWAYS, proofs
from tests.support.gateway_cell import JSON, SPEC, Cell, problem, running
from tests.support.services import while_running
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres
ACT = {"reason": "fans"}
WHO = f"{pwd.getpwuid(os.geteuid()).pw_name}@{socket.gethostname()}"
HOUR_MS = 3_600_000.0


@asynccontextmanager
async def system(dsn: str) -> AsyncIterator[tuple[Cell, "asyncio.Task[None]"]]:
    """Two nodes of four GPUs whose tasks run for an hour."""
    async with running(dsn) as cell:
        await cell.log.inner.create(topic_partitions(1))
        settings, stop = Settings(log_url=dsn, dsn=dsn), asyncio.Event()
        nodes = FakeNodes(cell.log.inner, [node_spec("n1"), node_spec("n2")], run_ms=HOUR_MS)
        obeying = asyncio.create_task(nodes.run())
        try:
            async with (
                while_running(run_placer(settings, stop, log=cell.log.inner), stop),
                while_running(run_estimator(settings, stop, log=cell.log.inner), stop),
            ):
                yield cell, obeying
        finally:
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)


async def until(cell: Cell, path: str, holds: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def look() -> bool:
        found.clear()
        found.update((await cell.http.get(path)).json())
        return bool(holds(found))

    await await_until(look, lambda: f"{path}: {found}")
    return dict(found)


async def submitted(cell: Cell) -> tuple[str, str]:
    """Submits a job of three GPUs; its id, and the node where it then runs."""
    spec = {**SPEC, "resources": {"gpus": 3, "cores": 1, "host_memory_mib": 64, "gpu_memory_mib": 64}}
    answer = await cell.http.post("/v1/jobs", json=spec)
    assert answer.status_code == 202, answer.text
    found = await until(cell, f"/v1/jobs/{answer.json()['job_id']}", lambda job: job["status"] == "running")
    return str(found["job_id"]), str(found["nodes"][0])


@dataclass(slots=True)
class Operator:
    """Acts on nodes by HTTP and by command."""

    cell: Cell
    capsys: pytest.CaptureFixture[str]

    async def command(self, *arguments: str) -> tuple[int, str, str]:
        """`penstock …` against this gateway: exit code, standard output and standard error."""
        code = await asyncio.to_thread(penstock, ["--server", self.cell.url, *arguments])
        out, err = self.capsys.readouterr()
        return code, out, err

    async def drain(self, job_id: str, first: str, other: str) -> None:
        """The job moves to the other node."""
        http = self.cell.http
        problem(await http.post("/v1/nodes/n9/drain", json=ACT), 404)
        problem(await http.post(f"/v1/nodes/{first}/drain", json={**ACT, "by": "ada"}), 400)
        problem(await http.post(f"/v1/nodes/{first}/drain", content=b"{", headers=JSON), 400)
        problem(await http.post(f"/v1/nodes/{first}/uncordon", json=ACT), 409)
        drained = await http.post(f"/v1/nodes/{first}/drain", json=ACT)
        assert (drained.status_code, drained.json()["applied"]) == (200, True)
        assert drained.json()["cordon"]["by"] == WHO
        moved = await until(
            self.cell, f"/v1/jobs/{job_id}", lambda job: job["status"] == "running" and job["attempt"] == 2
        )
        assert moved["nodes"] == [other]
        problem(await http.post(f"/v1/nodes/{first}/drain", json=ACT), 409)
        code, out, _ = await self.command("get", "nodes", "-o", "wide")
        assert code == 0
        assert "ready, drained" in out
        events = (await http.get(f"/v1/jobs/{job_id}/events")).json()["events"]
        assert [e["data"]["reason"] for e in events if e["type"] == "penstock.job.requeued"] == ["drained"]
        assert (await http.get("/v1/queue")).json()["waiting"] == 0

    async def uncordon(self, first: str) -> str:
        """A job that waits for the drained node runs there; its id."""
        spec = {**SPEC, "resources": {"gpus": 2}}
        waits = str((await self.cell.http.post("/v1/jobs", json=spec)).json()["job_id"])
        reason = await until(self.cell, f"/v1/jobs/{waits}/why", lambda found: found.get("histogram"))
        assert reason["histogram"]["nodes_cordoned"] == 1
        code, out, _ = await self.command("node", "uncordon", first, "--reason", "new fans", "-o", "json")
        assert code == 0
        assert json.loads(out)["cordon"] is None
        runs = await until(self.cell, f"/v1/jobs/{waits}", lambda job: job["status"] == "running")
        assert runs["nodes"] == [first]
        return waits

    async def fence(self, job_id: str, other: str) -> None:
        """The job is lost, and why."""
        code, _, err = await self.command("node", "fence", other)
        assert code != 0
        assert job_id in err, "the question names the jobs"
        assert "--yes" in err
        code, out, err = await self.command(
            "node", "fence", other, "--yes", "--reason", "burnt", "-o", "json"
        )
        assert code == 0, err
        assert json.loads(out)["status"] == "gone"
        [left] = [e.data for e in await self.cell.written(Topic.NODES) if isinstance(e.data, NodeLeft)]
        assert (left.proof, left.reason, left.by) == ("fenced", "burnt", WHO)
        lost = await until(
            self.cell,
            f"/v1/jobs/{job_id}/events",
            lambda found: any(e["type"] == "penstock.task.lost" for e in found["events"]),
        )
        [fact] = [e["data"] for e in lost["events"] if e["type"] == "penstock.task.lost"]
        assert fact["reason"] == f"its node was fenced by {left.by}: burnt"
        problem(await self.cell.http.post(f"/v1/nodes/{other}/fence", json=ACT), 409)

    async def lose(self, job_id: str, waits: str, first: str) -> dict[str, Any]:
        """The other node is silent: each answer about its job names what is unproven. The row of that."""
        http, silent = self.cell.http, NodeSuspected(node_id=first, reason="its connection broke")
        envelope = Envelope(id="watch-1", source="/watch", time_ms=1, data=silent)
        headers, value = to_wire(envelope)
        headers = (*headers, *proofs(GATEWAYS, envelope, value))
        await self.cell.log.inner.append([Message(Partition(Topic.NODES, 0), value, headers)])
        row = {"task_id": f"{waits}.1.w0", "node_id": first, "node": "suspect", "task": "running"}
        await until(self.cell, f"/v1/jobs/{waits}", lambda job: job["unproven"] == [row])
        for answer in ("eta", "tasks"):
            assert (await http.get(f"/v1/jobs/{waits}/{answer}")).json()["unproven"] == [row]
        listed = (await http.get("/v1/jobs")).json()["jobs"]
        assert {job["job_id"]: job["unproven"] for job in listed} == {job_id: [], waits: [row]}
        _, out, _ = await self.command("get", "jobs")
        assert f"({first} silent)" in out
        _, out, _ = await self.command("eta", waits)
        assert f"not proven: {row['task_id']} on {first}" in out
        return row


async def test_operators_take_nodes_out_of_use(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Fans of one machine are replaced, then the other burns and the first dies: every step is stored with who and why."""
    async with system(dsn) as (cell, machines):
        operator = Operator(cell, capsys)
        await until(cell, "/v1/nodes", lambda found: len(found["nodes"]) == 2)
        job_id, first = await submitted(cell)
        other = {"n1": "n2", "n2": "n1"}[first]
        await operator.drain(job_id, first, other)
        waits = await operator.uncordon(first)
        await operator.fence(job_id, other)
        row = await operator.lose(job_id, waits, first)
        machines.cancel()  # they die
        await cell.http.post(f"/v1/jobs/{waits}/cancel", json={})
        why = await until(cell, f"/v1/jobs/{waits}/why", lambda found: found["status"] == "stopping")
        assert "It ends as cancelled" in why["text"]
        assert why["unproven"] == [{**row, "task": "stopping"}]
        code, _, err = await operator.command("node", "fence", first, "--yes")
        assert code == 0, err
        await until(cell, f"/v1/jobs/{waits}", lambda job: job["outcome"] == "cancelled")
        verified = json.loads((await cell.http.post("/v1/projections/verify")).text)
        assert verified["ok"], verified
