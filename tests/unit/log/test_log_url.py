"""What a log URL may say, and what is answered to one that cannot work."""

import asyncio
from pathlib import Path

import pytest

from penstock.errors import ConfigurationError
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("kafka://host", "'host' is not host:port"),
        ("kafka://user@host:9092", "a name without a password"),
        ("kafka://user:secret@host:9092?tls=yes", "ca=FILE is the only option"),
        ("kafka://user:secret@host:9092?ca=", "ca=FILE is the only option"),
        ("kafka://user:secret@host:9092?ca=/no/such/file", "/no/such/file"),
        ("http://host:9092", "'http'"),
    ],
)
def test_a_mistake_is_named_and_no_password_shown(url: str, complaint: str) -> None:
    """A typing error in a deployment: the first line of a service's log must be enough."""
    with pytest.raises(ConfigurationError, match=complaint) as error:
        open_log(url, "gateway")
    assert "secret" not in str(error.value)


def test_a_file_without_certificates_is_no_authority(tmp_path: Path) -> None:
    """The key was mounted in place of the certificate."""
    file = tmp_path / "ca.pem"
    file.write_text("-----BEGIN PRIVATE KEY-----")
    with pytest.raises(ConfigurationError, match="name a PEM file with the authority's certificate"):
        open_log(f"kafka://host:9092?ca={file}", "gateway")


async def test_a_listener_without_encryption_is_told_from_one_that_is_away() -> None:
    """The port of the plain listener was given: waiting for it would not help."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"plain text, and then nothing")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        log = open_log(f"kafka://user:secret@127.0.0.1:{port}?ca=system", "gateway")
        assert isinstance(log, KafkaLog)
        with pytest.raises(ConfigurationError, match="does not speak TLS"):
            await log.start()
