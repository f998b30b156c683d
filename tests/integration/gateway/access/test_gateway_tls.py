"""TLS at the gateway with a self-made authority: what passes, and what is refused, with the remedy."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import warnings
from asyncio.subprocess import PIPE
from pathlib import Path

import httpx
import pytest

from infra.devservers.build_cache import INFRA
from infra.devservers.certificates import make_certificates
from penstock.backoff import Backoff
from penstock.cli.app import run as penstock
from penstock.client import Client, WaitTimeout
from penstock.client import streams as client_streams
from penstock.errors import ConfigurationError
from penstock.exits import Exit, Stop
from penstock.model.schema.topics import Topic
from penstock.runtime.keys.node_keys import OPERATOR_KEY, TRUST_LOG
from penstock.tls import client_context
from penstock_services.gateway.shell.options import Options
from penstock_services.gateway.shell.service import listening_socket
from penstock_services.node_reporter.options import Options as Reporter
from penstock_services.node_reporter.shell.link.connection import Connection
from penstock_services.node_reporter.shell.run import _connected
from tests.support.cluster.hand_placer import node_spec
from tests.support.gateway.gateway_cell import running
from tests.support.installation.services import port_of
from tests.support.waiting import await_until

OLD = ssl.TLSVersion.TLSv1_1


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, and `certificate.pem` and `key.pem` for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("authority")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    make_certificates(folder)
    return folder


def environment(folder: Path, **changes: Path | str) -> dict[str, str]:
    files = {"CERT": folder / "certificate.pem", "KEY": folder / "key.pem", **changes}
    return {OPERATOR_KEY: TRUST_LOG} | {
        f"PENSTOCK_GATEWAY_TLS_{name}": str(path) for name, path in files.items()
    }


def refusal(server: str, ca: Path | None = None) -> str:
    """What the command line answers to a user who names this server and authority."""
    with pytest.raises(Stop) as stopped:
        Client(server, ca=ca).get("/v1/status")
    assert stopped.value.code == Exit.BAD_SPEC
    return str(stopped.value)


@pytest.mark.postgres
async def test_everything_passes_encrypted_and_nothing_else(
    dsn: str,
    own: Path,
    stranger: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A team's gateway behind no proxy: commands, streams and the standing connections of nodes."""
    ca, other = own / "ca.pem", stranger / "ca.pem"
    async with running(dsn, ca=ca, certificate=own / "certificate.pem", key=own / "key.pem") as cell:
        port = cell.url.rpartition(":")[2]
        assert cell.url == f"https://127.0.0.1:{port}"
        cell.placer.join(node_spec("n0", 1))
        cell.placer.run(["a"])
        await cell.tell()
        await cell.caught_up()

        flags = ["--server", cell.url, "--ca", str(ca)]
        program = (sys.executable, "-c", "from penstock.cli.main import main; main()")
        submitting = await asyncio.create_subprocess_exec(
            *program, "submit", "--detach", *flags, "--", "true", stdout=PIPE
        )
        [job_id, *_] = (await submitting.communicate())[0].decode().split()
        with monkeypatch.context() as patch:
            patch.setenv("PENSTOCK_CA", str(ca))
            assert await asyncio.to_thread(penstock, ["get", "jobs", "--server", cell.url]) == 0
        assert capsys.readouterr().out.startswith("JOB")
        [written] = await cell.written(Topic.JOBS)
        assert written.data.job_id == job_id
        client = Client(cell.url, ca=ca)
        streamed = await asyncio.to_thread(lambda: next(client.stream("/v1/stream", after="0")))
        assert streamed.data["type"] == "penstock.term.started"
        with pytest.raises(WaitTimeout, match=f"job {job_id} has not ended within 0.4 s"):
            await asyncio.to_thread(client.wait, job_id, timeout_s=0.4)  # clock: it is what is tested

        keeping = [asyncio.create_task(standing(cell.url, each)) for each in (ca, other)]

        async def one_connected_and_one_refused() -> bool:
            return bool((await cell.http.get("/v1/nodes/n0")).json()["connected"] and caplog.records)

        await await_until(one_connected_and_one_refused, "a standing connection and a refused one")
        assert "its certificate is not accepted" in caplog.text
        assert "--gateway-ca must name the authority" in caplog.text
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)

        for wrong in (other, None):
            refused = await asyncio.to_thread(refusal, cell.url, wrong)
            assert "--ca or PENSTOCK_CA must name the authority that signed it" in refused
            assert str(wrong or "system") in refused
        monkeypatch.setattr(client_streams, "Backoff", NoSecondTry)
        with pytest.raises(Stop, match="certificate is not accepted"):
            await asyncio.to_thread(lambda: next(Client(cell.url, ca=other).stream("/v1/stream")))
        named = await asyncio.to_thread(refusal, f"https://localhost:{port}", ca)
        assert "must name localhost" in named
        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(shake_hands, int(port), OLD)
        assert await asyncio.to_thread(shake_hands, int(port), ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        clear = await asyncio.to_thread(refusal, f"http://127.0.0.1:{port}")
        assert clear.endswith("it speaks TLS only; write https://")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.RequestError):
                await http.get(f"http://127.0.0.1:{port}/healthz")


class NoSecondTry(Backoff):
    def next_s(self) -> float:
        pytest.fail("trying again mends nothing")


def shake_hands(port: int, version: ssl.TLSVersion) -> str | None:
    """As a client that speaks this version at most and trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # at the level of today no client could speak an old version
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        context.minimum_version, context.maximum_version = OLD, version
    address = "127.0.0.1", port
    with socket.create_connection(address) as plain, context.wrap_socket(plain) as wrapped:
        return wrapped.version()


async def standing(url: str, ca: Path) -> None:
    """A node-reporter's connection, until cancelled."""
    async with _connected(Reporter(node_id="n0", gateway=url, gateway_ca=ca)):
        await asyncio.Event().wait()


def test_a_named_authority_is_the_only_one(own: Path) -> None:
    """An authority that every machine trusts has signed a certificate for the gateway's name: of a
    stranger."""
    [only] = client_context(str(own / "ca.pem"), "--ca").get_ca_certs()
    assert only["subject"] == only["issuer"]


async def test_a_server_without_tls_is_told_from_one_that_is_away(own: Path) -> None:
    """`https://` was written for a gateway that does not encrypt, and an authority was named for
    `http://`."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        refused = await asyncio.to_thread(refusal, f"https://127.0.0.1:{port}", own / "ca.pem")
        assert "it does not speak TLS as this machine does" in refused
        assert "write http://" in refused
    assert "write https://" in refusal(f"http://127.0.0.1:{port}", own / "ca.pem")
    assert "/nowhere" in refusal(f"https://127.0.0.1:{port}", Path("/nowhere"))
    with pytest.raises(ConfigurationError, match="--gateway-ca=/nowhere"):
        Connection("https://127.0.0.1:1", "n0", None, Path("/nowhere"))
    with pytest.raises(Stop) as stopped:
        Client(f"http://127.0.0.1:{port}", tries=1).get("/v1/status")
    assert stopped.value.code == Exit.UNREACHABLE


def test_a_certificate_that_every_client_would_refuse_is_refused_at_the_start(
    own: Path, stranger: Path, tmp_path: Path
) -> None:
    """Files were renewed by halves, copied with the wrong mode, or forgotten until they had expired."""

    def complaint(**changes: Path | str) -> str:
        with pytest.raises(ConfigurationError) as raised:
            Options.from_env(environment(own, **changes))
        return str(raised.value)

    found = Options.from_env(environment(own))
    assert found.tls() is not None
    assert "PENSTOCK_GATEWAY_TLS_KEY is not set" in complaint(KEY="")
    assert "PENSTOCK_GATEWAY_TLS_CERT is not set" in complaint(CERT="")
    assert complaint(CERT=tmp_path / "none").startswith(
        f"PENSTOCK_GATEWAY_TLS_CERT: {tmp_path}/none is missing"
    )
    assert f"{stranger}/key.pem is not the key of" in complaint(KEY=stranger / "key.pem")
    assert "cannot be used" in complaint(CERT=own / "key.pem")
    readable = tmp_path / "key.pem"
    readable.write_bytes((own / "key.pem").read_bytes())
    readable.chmod(0o640)
    assert f"has mode 0640, others can use it; run chmod 600 {readable}" in complaint(KEY=readable)
    locked = tmp_path / "locked.pem"
    openssl("pkey", "-in", own / "key.pem", "-aes128", "-passout", "pass:x", "-out", locked)
    locked.chmod(0o600)
    assert "has a passphrase" in complaint(KEY=locked)
    assert "certificate has expired" in complaint(CERT=expired(own, tmp_path))


@pytest.mark.postgres
async def test_a_renewed_certificate_is_shown_without_a_restart(
    dsn: str, own: Path, stranger: Path, tmp_path: Path
) -> None:
    """Every 60 days a tool writes new files and sends SIGHUP. Once it is killed between the two files, and
    once the disk is full."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"

    async def shown() -> str:
        """To a new connection."""
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))

    def written(folder: Path, *paths: Path) -> None:
        for path in paths:
            path.touch(mode=0o600)
            path.write_bytes((folder / path.name).read_bytes())

    written(own, certificate, key)
    env = {**os.environ, **environment(tmp_path), "PENSTOCK_GATEWAY_BIND": "127.0.0.1:0"}
    env |= {"PENSTOCK_LOG": dsn, "PENSTOCK_DSN": dsn}
    gateway = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock_services.gateway"), env=env, stdout=PIPE, stderr=PIPE
    )
    assert gateway.stdout is not None
    assert gateway.stderr is not None
    log = ""

    async def renewed(word: str) -> None:
        """It has tried, and its log has this word."""
        nonlocal log
        gateway.send_signal(signal.SIGHUP)
        while word not in log:
            line = await gateway.stderr.readline()
            assert line, f"it has ended: {log}"
            log += line.decode()

    try:
        assert await gateway.stdout.readline() == b"ready\n"
        port = port_of(gateway.pid)
        old, new = ((folder / "certificate.pem").read_text() for folder in (own, stranger))
        async with httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{port}", verify=client_context(str(own / "ca.pem"), "ca")
        ) as http:
            assert (await http.get("/healthz")).status_code == 200
            assert await shown() == old
            written(stranger, certificate)
            await renewed("is not the key of the certificate")
            certificate.write_bytes(b"")
            await renewed("cannot be used")
            assert await shown() == old, "what is in use stays"
            written(stranger, certificate, key)
            await renewed("new connections are shown")
            assert await shown() == new
            assert (await http.get("/healthz")).status_code == 200, "connections that stand go on"
    finally:
        gateway.terminate()
        await gateway.communicate()
    assert gateway.returncode == 0


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def expired(own: Path, folder: Path) -> Path:
    """A certificate of the authority for the gateway's key that ended yesterday."""
    config, request, certificate = (
        INFRA / "kafka/certificates.cnf",
        folder / "request",
        folder / "expired.pem",
    )
    openssl("req", "-config", config, "-new", "-key", own / "key.pem", "-out", request)
    openssl(
        *("x509", "-req", "-in", request, "-CA", own / "ca.pem", "-CAkey", own / "ca.key", "-days", "-1"),
        *("-extfile", config, "-extensions", "broker", "-out", certificate),
    )
    return certificate


def test_clear_text_that_others_can_read_is_warned_of(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gateway was opened to the network, and encryption left for later."""
    with caplog.at_level(logging.WARNING):
        listening_socket(Options("127.0.0.1", 0)).close()
        given = Options("0.0.0.0", 0, tmp_path, certificate=own / "certificate.pem", key=own / "key.pem")
        listening_socket(given).close()
        assert caplog.text == ""
        listening_socket(Options("0.0.0.0", 0, tmp_path)).close()
    assert "PENSTOCK_GATEWAY_TLS_CERT" in caplog.text
