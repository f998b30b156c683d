"""A real gateway is killed while pipelines follow their jobs, some of them are killed with it, and it comes
back."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.model.inputs.followers import PIPELINE_GONE
from tests.support.cli.command_process import PENSTOCK, ROOT
from tests.support.waiting import await_until

pytestmark = [pytest.mark.postgres, pytest.mark.slow]

ROUNDS, PIPELINES = 3, 4
GRACE = "60s"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@asynccontextmanager
async def service(name: str, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A ready one; killed at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"penstock_services.{name}",
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n", name
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def end_all(clients: dict[str, asyncio.subprocess.Process]) -> None:
    for process in clients.values():
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_whose_pipeline_came_back_goes_on_and_the_others_end(dsn: str, tmp_path: Path) -> None:
    """Of each two pipelines one is killed with the gateway, three times. Nothing needs a node: all jobs wait
    for their estimates."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    env = {"PENSTOCK_DSN": dsn, "PENSTOCK_LOG": dsn, "PENSTOCK_GATEWAY_BIND": f"127.0.0.1:{port}"}
    client = {**os.environ, "PENSTOCK_SERVER": url, "HOME": str(tmp_path)}
    line = ("submit", "-q", "--tied", "--tied-grace", GRACE, "--gpus", "0")
    clients: dict[str, asyncio.subprocess.Process] = {}
    async with AsyncExitStack() as stack, httpx.AsyncClient(base_url=url, timeout=None) as http:
        for name in ("placer", "projector"):
            await stack.enter_async_context(service(name, env))
        stack.push_async_callback(end_all, clients)

        async def jobs() -> dict[str, dict[str, Any]]:
            try:
                found = (await http.get("/v1/jobs?limit=1000")).json()["jobs"]
            except (httpx.TransportError, json.JSONDecodeError, KeyError):
                return {}
            return {job["name"]: job for job in found}

        async def followed(names: list[str]) -> bool:
            known = await jobs()
            for name in names:
                if name not in known:
                    return False
                found = (await http.get(f"/v1/jobs/{known[name]['job_id']}")).json()
                if found["unfollowed_ms"] is not None:
                    return False
            return True

        gone: list[str] = []
        for number in range(ROUNDS + 1):
            async with service("gateway", env) as gateway:
                if gone:

                    async def ended() -> bool:
                        known = await jobs()
                        return all(known.get(name, {}).get("outcome") for name in gone)

                    await await_until(ended, lambda: f"the ends of {gone}")
                    known = await jobs()
                    assert {known[name]["reason"].partition(" since ")[0] for name in gone} == {PIPELINE_GONE}
                    assert [name for name in clients if known[name]["outcome"]] == []
                    assert await followed(list(clients))
                    assert [name for name, process in clients.items() if process.returncode is not None] == []
                if number == ROUNDS:
                    break
                for index in range(PIPELINES):
                    name = f"pipeline-{number}-{index}"
                    clients[name] = await asyncio.create_subprocess_exec(
                        *PENSTOCK,
                        *line,
                        "--name",
                        name,
                        "--",
                        "true",
                        env=client,
                        cwd=ROOT,
                        stdout=asyncio.subprocess.DEVNULL,
                        stderr=asyncio.subprocess.DEVNULL,
                    )
                await await_until(lambda: followed(list(clients)), "followers")
                gateway.kill()
                for name in list(clients)[::2]:
                    gone.append(name)
                    clients.pop(name).send_signal(signal.SIGKILL)
                await gateway.wait()
