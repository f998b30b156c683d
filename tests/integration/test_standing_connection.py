"""A reporter's standing connection to the gateway: broken by dropped packets, it makes the node suspect; closed in order, not."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from penstock.model.external_events import NodeSuspected
from penstock.model.topics import Topic
from penstock.runtime.settings import Settings
from penstock_services.gateway.shell import connections
from penstock_services.gateway.shell import service as gateway_service
from penstock_services.gateway.shell.options import Options
from penstock_services.node_reporter.shell.connection import Connection
from tests.support.forgeries import GATEWAYS
from tests.support.gateway_cell import WITHIN_S, Cell, running
from tests.support.hand_placer import node_spec

pytestmark = pytest.mark.postgres

NOTICED_WITHIN_S = 30.0
SPACE, OURS, THEIRS = f"penstock-{os.getpid()}", f"pen-a{os.getpid()}"[:15], f"pen-b{os.getpid()}"[:15]
NETWORK = (
    f"10.213.{os.getpid() % 256}",
    os.getpid() // 256 % 64 * 4,
)  # of four addresses, for runs side by side
GATEWAY, REPORTER = (f"{NETWORK[0]}.{NETWORK[1] + number}" for number in (1, 2))
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


class Address:
    """One address for several gateways: a balancer that can be pointed elsewhere, and then cuts what it carries."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._carried: set[asyncio.StreamWriter] = set()

    def point_to(self, port: int) -> None:
        self.port = port
        for writer in self._carried:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            onward, answers = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, answers}
        self._carried |= ends
        copies = [asyncio.create_task(copied(reader, answers)), asyncio.create_task(copied(onward, writer))]
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.transport.abort()
        self._carried -= ends
        await asyncio.gather(*copies, return_exceptions=True)


async def copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()


@asynccontextmanager
async def another_gateway(dsn: str) -> AsyncIterator[int]:
    """On the same cell; its port, which it has again when it starts again."""
    options = Options("127.0.0.1", 0, operator_key=GATEWAYS)
    listener = gateway_service.listening_socket(options)
    stop, ready = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        gateway_service.serve(
            Settings(log_url=dsn, dsn=dsn), options, stop, ready=ready, listener=listener.dup()
        )
    )
    try:
        await asyncio.wait_for(ready.wait(), WITHIN_S)
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await asyncio.wait_for(serving, WITHIN_S)
        listener.close()


async def at(port: int, *nodes: str) -> None:
    async with asyncio.timeout(WITHIN_S), httpx.AsyncClient() as http:
        for name in nodes:
            url = f"http://127.0.0.1:{port}/v1/nodes/{name}"
            while (await http.get(url)).json().get("connected") is not True:
                await asyncio.sleep(0.02)


async def silent(_: Connection) -> None:
    """Of a machine that dies."""


async def test_no_node_is_suspect_because_its_gateway_ends(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gateways behind one address. All nodes lose their connections at once: one gateway is taken out for an upgrade and
    comes back, then the balancer sends all nodes to the other. One node then stops in good order; another one dies."""
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 1.0)
    names = ["n0", "n1", "n2"]

    async with running(dsn) as cell:
        for name in names:
            cell.placer.join(node_spec(name, 1))
        await cell.tell()
        await cell.caught_up()
        first, address = int(cell.url.rpartition(":")[2]), Address(0)
        async with await asyncio.start_server(address.carry, "127.0.0.1", 0) as balancer:
            url = f"http://127.0.0.1:{balancer.sockets[0].getsockname()[1]}"
            keeping = {name: asyncio.create_task(Connection(url, name, None).keep()) for name in names}
            async with another_gateway(dsn) as port:
                address.port = port
                await at(port, *names)
            async with another_gateway(dsn) as port:
                address.port = port
                await at(port, *names)
                address.point_to(first)
                await at(first, *names)
                address.point_to(port)
                await at(port, *names)
                await asyncio.sleep(1.5)
                assert await suspicions(cell) == [], "each of them is connected"
                address.port = first
                keeping["n1"].cancel()
                await asyncio.gather(keeping.pop("n1"), return_exceptions=True)
                await asyncio.sleep(1.5)
                assert await suspicions(cell) == [], "the other gateway has its goodbye"
                monkeypatch.setattr(Connection, "_goodbye", silent)
                for task in keeping.values():
                    task.cancel()
                async with asyncio.timeout(WITHIN_S):
                    while len(await suspicions(cell)) < len(keeping):
                        await asyncio.sleep(0.05)
                assert sorted(await suspicions(cell)) == ["n0", "n2"]
            await asyncio.gather(*keeping.values(), return_exceptions=True)


async def test_a_node_that_dies_with_its_gateway_is_missed(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rack loses its power, and a gateway, `n1` and `n2` with it. The gateway starts elsewhere, `n1` boots, `n2` does not; `n0`
    was at the other gateway all the time."""
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 0.5)
    monkeypatch.setattr(connections, "RETURNED_WITHIN_S", 3.0)
    async with running(dsn) as cell:
        for name in ("n0", "n1", "n2"):
            cell.placer.join(node_spec(name, 1))
        await cell.tell()
        await cell.caught_up()
        there, rack = asyncio.create_task(Connection(cell.url, "n0", None).keep()), Address(0)
        async with await asyncio.start_server(rack.carry, "127.0.0.1", 0) as balancer:
            url = f"http://127.0.0.1:{balancer.sockets[0].getsockname()[1]}"
            boots, dies = (asyncio.create_task(Connection(url, name, None).keep()) for name in ("n1", "n2"))
            async with another_gateway(dsn) as port:
                rack.port = port
                await at(port, "n1", "n2")
            monkeypatch.setattr(Connection, "_goodbye", silent)
            dies.cancel()
            async with another_gateway(dsn) as port:
                rack.port = port
                await at(port, "n1")
                async with asyncio.timeout(WITHIN_S):
                    while not await suspicions(cell):
                        await asyncio.sleep(0.05)
                await asyncio.sleep(0.5)
                assert await suspicions(cell) == ["n2"]
            for task in (boots, there):
                task.cancel()
            await asyncio.gather(boots, dies, there, return_exceptions=True)


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
