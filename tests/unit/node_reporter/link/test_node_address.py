"""Which address a node announces, and what `--address` may be."""

import asyncio
import socket
from typing import Any

import pytest

from penstock.errors import ConfigurationError, LogError
from penstock.log.open import log_hosts
from penstock_services.node_reporter.shell.link.address import own_address

AWAY = "kafka://node:secret@192.0.2.1:9092,192.0.2.2:9093"
HERE = "postgresql://penstock:secret@127.0.0.1:5432/penstock"


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("kafka://a:9092", [("a", 9092)]),
        ("kafka://user:p%40ss@a:9092,[2001:db8::1]:9093?ca=system", [("a", 9092), ("2001:db8::1", 9093)]),
        ("postgresql://user:secret@db.example:6432/penstock", [("db.example", 6432)]),
        ("postgres://user@a,b:6433/penstock", [("a", 5432), ("b", 6433)]),
        ("postgresql://user@[2001:db8::1]/penstock", [("2001:db8::1", 5432)]),
        ("postgresql:///penstock?host=/run/postgresql&port=5433", []),
        ("postgresql:///penstock?host=db&port=5433", [("db", 5433)]),
        ("postgresql:///penstock", []),
        ("memory", []),
    ],
)
def test_where_the_log_is(url: str, hosts: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an administrator may write into the log's URL."""
    monkeypatch.delenv("PGHOST", raising=False)
    assert log_hosts(url) == hosts


@pytest.mark.parametrize("url", [HERE, "kafka://localhost:9092", "postgresql:///p?host=/run/postgresql"])
async def test_all_on_one_machine_is_loopback(url: str) -> None:
    """A laptop, with or without a network."""
    assert await own_address(None, url) in ("127.0.0.1", "::1")
    assert await own_address("127.0.0.1", url) == "127.0.0.1"
    assert await own_address("192.0.2.7", url) == "192.0.2.7", "behind a tunnel to the log"


@pytest.mark.parametrize("url", [AWAY, HERE])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("0.0.0.0", "stands for all addresses"),
        ("::", "stands for all addresses"),
        ("224.0.0.1", "is not reached over a router"),
        ("fe80::1", "is not reached over a router"),
        ("10.0.0.1:29500", "without brackets and port"),
        ("[2001:db8::1]", "without brackets and port"),
        ("http://node-1", "without brackets and port"),
        ("", "without brackets and port"),
    ],
)
async def test_an_address_that_others_cannot_use_is_refused(url: str, given: str, problem: str) -> None:
    """Copied from the line above in a settings file, where it is the address to listen on."""
    with pytest.raises(ConfigurationError, match=problem) as error:
        await own_address(given, url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("given", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
async def test_loopback_is_refused_where_the_log_is_on_another_machine(given: str) -> None:
    """A setting of the first try on one machine was copied to the second."""
    with pytest.raises(
        ConfigurationError, match=r"is loopback, but the log is on 192\.0\.2\.1: .*PENSTOCK_NODE_ADDRESS"
    ):
        await own_address(given, AWAY)
    assert await own_address("10.0.0.7", AWAY) == "10.0.0.7"


def resolving(monkeypatch: pytest.MonkeyPatch, names: dict[str, str]) -> None:
    """Names of a name service; others do not exist."""

    async def look_up(
        _: object,
        host: str,
        port: Any,
        *,
        type: int,  # noqa: A002 - as getaddrinfo has it
    ) -> list[Any]:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 0, "", (names[host], port or 0))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", look_up)


async def test_a_log_whose_name_is_loopback_here_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's installer writes `127.0.1.1 db` into /etc/hosts of the machine db, where a node-reporter runs
    beside the log."""
    resolving(monkeypatch, {"db": "127.0.1.1"})
    with pytest.raises(
        ConfigurationError, match=r"host db is this machine's loopback address here .*--address"
    ):
        await own_address(None, "kafka://db:9092")
    assert await own_address("10.0.0.2", "kafka://db:9092") == "10.0.0.2"


async def test_names_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name service is not up yet at boot: that passes. A name that is loopback on its own machine does
    not."""
    resolving(monkeypatch, {"n1": "127.0.1.1", "n2": "10.0.0.2"})
    assert await own_address("n2", AWAY) == "n2"
    with pytest.raises(ConfigurationError, match=r"n1 \(127\.0\.1\.1\) is loopback"):
        await own_address("n1", AWAY)
    with pytest.raises(LogError, match="--address n3 has no address: Name or service not known"):
        await own_address("n3", AWAY)
    with pytest.raises(LogError, match=r"no route to the log \(db: Name or service not known\).*--address"):
        await own_address(None, "kafka://db:9092")
