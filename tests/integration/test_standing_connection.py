"""A reporter's standing connection to the gateway: broken by dropped packets, it makes the node suspect; closed in order, not."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.model.external_events import NodeSuspected
from penstock.model.topics import Topic
from penstock_services.gateway.shell import connections
from penstock_services.node_reporter.shell.connection import Connection
from tests.support.gateway_cell import Cell, running
from tests.support.hand_placer import node_spec

pytestmark = pytest.mark.postgres

NOTICED_WITHIN_S = 30.0
SPACE, OURS, THEIRS = f"penstock-{os.getpid()}", f"pen-a{os.getpid()}"[:15], f"pen-b{os.getpid()}"[:15]
GATEWAY, REPORTER = "10.213.77.1", "10.213.77.2"
CLIENT = (
    "import asyncio, sys; from penstock_services.node_reporter.shell.connection import Connection; "
    "from pathlib import Path; asyncio.run(Connection(sys.argv[1], 'n0', *(list(map(Path, sys.argv[2:])) or [None])).keep())"
)


async def suspicions(cell: Cell) -> list[str]:
    return [
        event.data.node_id
        for event in await cell.written(Topic.NODES)
        if isinstance(event.data, NodeSuspected)
    ]


async def joined(cell: Cell, headers: dict[str, str] | None = None) -> None:
    cell.placer.join(node_spec("n0", 1))
    await cell.tell()
    await cell.caught_up(headers)


async def connected(cell: Cell, expected: bool = True, headers: dict[str, str] | None = None) -> None:
    """Waits until the gateway has a connection of n0, or has none."""
    async with asyncio.timeout(10):
        while (await cell.http.get("/v1/nodes/n0", headers=headers)).json()["connected"] != expected:
            await asyncio.sleep(0.02)


async def test_a_break_makes_suspect_and_a_restart_does_not(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reporter is upgraded, then its connection is cut by a router and made again, then it is killed for good."""
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 0.5)
    async with running(dsn) as cell:
        await joined(cell)
        for _ in range(2):
            keeping = asyncio.create_task(Connection(cell.url, "n0", None).keep())
            await connected(cell)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await connected(cell, False)
        await asyncio.sleep(0.7)
        assert await suspicions(cell) == []
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, cell.url)
        await connected(cell)
        killed.kill()
        await killed.wait()
        again = asyncio.create_task(Connection(cell.url, "n0", None).keep())
        await connected(cell)
        await asyncio.sleep(0.7)
        assert await suspicions(cell) == []
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        killed = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, cell.url)
        await connected(cell)
        killed.kill()
        await killed.wait()
        async with asyncio.timeout(5):
            while not await suspicions(cell):
                await asyncio.sleep(0.05)
        assert await suspicions(cell) == ["n0"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def wire() -> Iterator[None]:
    """A network namespace behind a pair of virtual cards."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("dropping packets between network namespaces needs root and `ip`")
    with ExitStack() as stack:
        try:
            ip("netns", "add", SPACE)
            stack.callback(
                lambda: subprocess.run(["ip", "netns", "del", SPACE], capture_output=True, timeout=10)
            )
            ip("link", "add", OURS, "type", "veth", "peer", "name", THEIRS, "netns", SPACE)
            stack.callback(
                lambda: subprocess.run(["ip", "link", "del", OURS], capture_output=True, timeout=10)
            )
            ip("addr", "add", f"{GATEWAY}/30", "dev", OURS)
            ip("link", "set", OURS, "up")
            ip("-n", SPACE, "addr", "add", f"{REPORTER}/30", "dev", THEIRS)
            ip("-n", SPACE, "link", "set", THEIRS, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives no network namespace: {error.stderr.decode().strip()}")
        yield


@pytest.mark.timeout(90)
async def test_a_pulled_plug_is_noticed_within_half_a_minute(dsn: str, tmp_path: Path, wire: None) -> None:
    """No packet comes any more, not even a reset: only the kernel's keepalive can notice."""
    del wire
    token, tokens = tmp_path / "token", tmp_path / "tokens"
    token.write_text("a-token-of-n0")
    digest = hashlib.sha256(b"a-token-of-n0").hexdigest()
    tokens.write_text(f"sha256:{digest} roles=node,read node=n0\n")
    tokens.chmod(0o600)
    headers = {"authorization": "Bearer a-token-of-n0"}
    async with running(dsn, host="0.0.0.0", tokens=tokens) as cell:
        await joined(cell, headers)
        url = cell.url.replace("127.0.0.1", GATEWAY)
        command = ("ip", "netns", "exec", SPACE, sys.executable, "-c", CLIENT, url, str(token))
        reporter = await asyncio.create_subprocess_exec(*command)
        try:
            await connected(cell, headers=headers)
            ip("-n", SPACE, "link", "set", THEIRS, "down")
            began_s = time.monotonic()
            async with asyncio.timeout(NOTICED_WITHIN_S):
                while not await suspicions(cell):
                    await asyncio.sleep(0.2)
            print(f"noticed after {time.monotonic() - began_s:.1f} s")
        finally:
            reporter.kill()
            await reporter.wait()
        assert await suspicions(cell) == ["n0"]
