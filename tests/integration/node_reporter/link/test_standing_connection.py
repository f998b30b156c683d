"""A reporter's standing connection to the gateway: broken by dropped packets, it makes the node suspect;
closed in order, not."""

import asyncio
import hashlib
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock import keepalive
from penstock.model.inputs.external_events import NodeSuspected
from penstock.model.schema.topics import Topic
from penstock.runtime.race import first_of
from penstock.runtime.settings import Settings
from penstock_services.gateway.shell import service as gateway_service
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.routes import connections
from penstock_services.gateway.shell.store import Store
from penstock_services.node_reporter.shell.link import connection
from penstock_services.node_reporter.shell.link.connection import Connection
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import Cell, running
from tests.support.installation.namespaces import ip, network
from tests.support.node_reporter.forgeries import GATEWAYS
from tests.support.waiting import await_until

pytestmark = pytest.mark.postgres

NOTICED_WITHIN_S = 30.0
CLIENT = (
    "import asyncio, sys; from penstock_services.node_reporter.shell.link.connection import Connection; "
    "from pathlib import Path; asyncio.run(Connection(sys.argv[1], 'n0', *(list(map(Path, sys.argv[2:])) or "
    "[None])).keep())"
)


class Patience:
    """Instead of the gateways' sleeps: each lasts until the test lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._sleeps: list[tuple[float, asyncio.Future[None]]] = []
        patched = SimpleNamespace(sleep=self._sleep, ensure_future=asyncio.ensure_future)
        monkeypatch.setattr(connections, "asyncio", patched)

    async def _sleep(self, seconds: float) -> None:
        if seconds >= connections.REPLACED_WITHIN_S:  # else that of a crowd
            self._sleeps.append((seconds, future := asyncio.get_running_loop().create_future()))
            await future

    async def begun(self, seconds: float, count: int = 1) -> None:
        """Waits until so many are under way, each at least so long."""

        def under_way() -> list[float]:
            return [lasts_s for lasts_s, future in self._sleeps if not future.done() and lasts_s >= seconds]

        await await_until(
            lambda: len(under_way()) >= count, lambda: f"{count} of {seconds} s; {self._sleeps}"
        )

    def over(self) -> None:
        """Time passes, more than all that are under way."""
        for _, future in self._sleeps:
            if not future.done():
                future.set_result(None)


class Rolls:
    """What the gateways have entered into Postgres, in order of their starts, 0 first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._moments: dict[Store, datetime] = {}
        call_roll = Store.call_roll

        async def noted(store: Store) -> tuple[datetime, int]:
            moment, entries = await call_roll(store)
            self._moments[store] = moment
            return moment, entries

        monkeypatch.setattr(Store, "call_roll", noted)

    async def complete(self, gateway: int, *present: str, missing: Sequence[str] = ()) -> None:
        """Waits until the latest connections of these nodes are entered as this gateway's, and all but the
        missing ones have answered its roll call: in a cell it has a minute for that."""
        found: list[object] = []

        async def so() -> bool:
            if len(self._moments) <= gateway:
                return False
            store, moment = list(self._moments.items())[gateway]
            rows = await store.fetch(f"SELECT node_id, connection_id FROM {store._own}.connections")
            latest = {row[0]: row[1] for row in rows}
            late = [node_id for node_id, _ in await store.unanswered_since(moment)]
            found[:] = [latest, store._standing, late]
            return late == list(missing) and all(latest.get(name) in store._standing for name in present)

        await await_until(so, lambda: f"{present} at gateway {gateway}: {found}")


@pytest.fixture
def rolls(monkeypatch: pytest.MonkeyPatch) -> Rolls:
    return Rolls(monkeypatch)


@pytest.fixture(autouse=True)
def goodbyes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: a reporter that ends waits two seconds for the answer to its goodbye, not
    for ever."""
    monkeypatch.setattr(connection, "GOODBYE_TIMEOUT_S", 3_600.0)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Patience:
    return Patience(monkeypatch)


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

    async def so() -> bool:
        answer = await cell.http.get("/v1/nodes/n0", headers=headers)
        return bool(answer.json()["connected"] == expected)

    await await_until(so, f"connected: {expected}")


async def suspected(cell: Cell, count: int) -> list[str]:
    """All that have been suspected, once there are so many."""
    found: list[str] = []

    async def look() -> bool:
        found[:] = await suspicions(cell)
        return len(found) >= count

    await await_until(look, lambda: f"{count} nodes suspected; {found}")
    return found


async def test_a_break_makes_suspect_and_a_restart_does_not(dsn: str, patience: Patience) -> None:
    """A reporter is upgraded, then its connection is cut by a router and made again, then it is killed for
    good."""
    async with running(dsn) as cell:
        await joined(cell)
        for _ in range(2):
            keeping = asyncio.create_task(Connection(cell.url, "n0", None).keep())
            await connected(cell)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await connected(cell, False)
            patience.over()
        await killed(cell, patience)
        again = asyncio.create_task(Connection(cell.url, "n0", None).keep())
        await connected(cell)
        patience.over()
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)
        await killed(cell, patience)
        patience.over()
        assert await suspected(cell, 1) == ["n0"], "once, in the end"


async def killed(cell: Cell, patience: Patience) -> None:
    """A reporter connects and is killed; returns when the gateway waits for its return."""
    reporter = await asyncio.create_subprocess_exec(sys.executable, "-c", CLIENT, cell.url)
    await connected(cell)
    reporter.kill()
    await reporter.wait()
    await patience.begun(connections.REPLACED_WITHIN_S)


class Address:
    """One address for several gateways: a balancer that can be pointed elsewhere, and then cuts what it
    carries."""

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
        await first_of(ready.wait(), asyncio.shield(serving))
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await serving
        listener.close()


async def silent(_: Connection) -> None:
    """Of a machine that dies."""


async def test_no_node_is_suspect_because_its_gateway_ends(
    dsn: str, patience: Patience, rolls: Rolls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways behind one address. All nodes lose their connections at once: one gateway is taken out for
    an upgrade and comes back, then the balancer sends all nodes to the other. One node then stops in good
    order; another one dies."""
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
                await rolls.complete(1, *names)
            async with another_gateway(dsn) as port:
                address.port = port
                await rolls.complete(2, *names)
                address.point_to(first)
                await rolls.complete(0, *names)
                address.point_to(port)
                await rolls.complete(2, *names)
                patience.over()  # each of them is connected
                address.port = first
                keeping["n1"].cancel()
                await asyncio.gather(keeping.pop("n1"), return_exceptions=True)
                await patience.begun(connections.REPLACED_WITHIN_S)
                patience.over()  # the other gateway has its goodbye
                monkeypatch.setattr(Connection, "_goodbye", silent)
                for task in keeping.values():
                    task.cancel()
                await patience.begun(connections.REPLACED_WITHIN_S, 2)
                patience.over()
                assert sorted(await suspected(cell, 2)) == ["n0", "n2"]
            await asyncio.gather(*keeping.values(), return_exceptions=True)


async def test_a_node_that_dies_with_its_gateway_is_missed(
    dsn: str, patience: Patience, rolls: Rolls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rack loses its power, and a gateway, `n1` and `n2` with it. The gateway starts elsewhere, `n1` boots,
    `n2` does not; `n0` was at the other gateway all the time, and dies much later."""
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
                await rolls.complete(1, "n1", "n2")
                await rolls.complete(0, "n0")
            monkeypatch.setattr(Connection, "_goodbye", silent)
            dies.cancel()
            async with another_gateway(dsn) as port:
                rack.port = port
                await rolls.complete(2, "n1", missing=["n2"])
                await patience.begun(connections.RETURNED_WITHIN_S)
                patience.over()
                assert await suspected(cell, 1) == ["n2"]
                there.cancel()
                await patience.begun(connections.REPLACED_WITHIN_S)
                patience.over()
                assert await suspected(cell, 2) == ["n2", "n0"]
            for task in (boots, there):
                task.cancel()
            await asyncio.gather(boots, dies, there, return_exceptions=True)


async def test_a_pulled_plug_is_noticed(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No packet comes any more, not even a reset: only the kernel's keepalive can notice, here after
    seconds."""
    assert keepalive.BROKEN_AFTER_S + connections.REPLACED_WITHIN_S <= NOTICED_WITHIN_S
    named = {option: value for _, option, value in keepalive.SOCKET_OPTIONS}
    assert named[socket.TCP_USER_TIMEOUT] == keepalive.BROKEN_AFTER_S * 1_000
    sooner = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_USER_TIMEOUT: 3_000}
    options = [
        (level, option, sooner.get(option, value)) for level, option, value in keepalive.SOCKET_OPTIONS
    ]
    monkeypatch.setattr(keepalive, "SOCKET_OPTIONS", options)
    monkeypatch.setattr(connections, "REPLACED_WITHIN_S", 0.1)
    token, tokens = tmp_path / "token", tmp_path / "tokens"
    token.write_text("a-token-of-n0")
    digest = hashlib.sha256(b"a-token-of-n0").hexdigest()
    tokens.write_text(f"sha256:{digest} roles=node,read node=n0\n")
    tokens.chmod(0o600)
    headers = {"authorization": "Bearer a-token-of-n0"}
    with network(1) as (here, [machine]):
        async with running(dsn, host="0.0.0.0", tokens=tokens) as cell:
            await joined(cell, headers)
            url = cell.url.replace("127.0.0.1", here)
            command = (*machine.enter, sys.executable, "-c", CLIENT, url, str(token))
            reporter = await asyncio.create_subprocess_exec(*command)
            try:
                await connected(cell, headers=headers)
                ip("-n", machine.name, "link", "set", "eth0", "down")
                assert await suspected(cell, 1) == ["n0"]
            finally:
                reporter.kill()
                await reporter.wait()
