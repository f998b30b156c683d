"""`penstock doctor` on a machine where something is missing: each finding has its remedy, and nothing shows a
password."""

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from infra.devservers.certificates import make_certificates
from penstock.cli.app import run as penstock
from penstock.cli.operations.doctor import Finding, _addresses
from penstock.errors import ConfigurationError
from penstock.local.doctor import reach
from penstock.local.doctor.env_file import read_env_file
from penstock.local.doctor.machine import machine_findings
from penstock.local.doctor.reach import (
    EXPIRED,
    _for_verdict,
    _kafka_certificate,
    certificate_of,
    log_server_findings,
)
from penstock.tls import SYSTEM_CA, client_context

AWAY = "http://127.0.0.1:9"


def by_name(env: dict[str, str]) -> dict[str, Finding]:
    return {finding.what: finding for finding in machine_findings(env, whole=True)}


def private(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Of this machine, on which no program listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


def test_a_file_of_settings_is_read_as_systemd_reads_it(tmp_path: Path) -> None:
    """The same file starts the service."""
    path = tmp_path / "node.env"
    path.write_text("# a comment\n\n; another\nA=1\nB=two words\nC='quoted words'\nD=\nE=a=b\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "quoted words", "D": "", "E": "a=b"}
    path.write_text("A=1\nsecret-without-a-name\n")
    with pytest.raises(ConfigurationError, match="line 2: not NAME=value") as error:
        read_env_file(path)
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_env_file(tmp_path / "absent.env")


def test_a_node_whose_settings_are_wrong_in_every_way(tmp_path: Path, closed_port: int) -> None:
    """Each mistake is found in one run, not one after the other at each start."""
    url = f"postgresql://node:s3cret@127.0.0.1:{closed_port}/penstock"
    found = by_name(
        {
            "PENSTOCK_LOG_FILE": private(tmp_path / "log.url", url),
            "PENSTOCK_NODE_TOKEN_FILE": private(tmp_path / "node.token", "t", mode=0o644),
            "PENSTOCK_NODE_ADDRESS": "0.0.0.0",
            "PENSTOCK_TASK_USER": "no-such-user",
            "PENSTOCK_STATE_DIR": str(tmp_path / "state"),
        }
    )
    problems = {what: finding.found for what, finding in found.items() if finding.remedy}
    assert f"127.0.0.1:{closed_port}: Connection refused" in problems["log"]
    assert "mode 0644" in problems["private file"]
    assert "chmod 600" in problems["private file"] + found["private file"].remedy
    assert "stands for all addresses" in problems["address"]
    assert "no-such-user" in problems["task user"]
    assert "none" in problems["standing connection"]
    assert "s3cret" not in repr(found)


def test_an_address_of_another_machine_is_found(tmp_path: Path, closed_port: int) -> None:
    """The settings of one node were copied to the next."""
    env = {"PENSTOCK_LOG": f"kafka://127.0.0.1:{closed_port}", "PENSTOCK_NODE_ADDRESS": "192.0.2.7"}
    found = by_name(env)["address"]
    assert "no program here can listen there" in found.found
    assert "PENSTOCK_NODE_ADDRESS" in found.remedy


def test_the_gateways_certificate_is_dated_and_named(tmp_path: Path) -> None:
    """One that ends tomorrow still works; the doctor is asked before it does not."""
    make_certificates(tmp_path)
    (tmp_path / "key.pem").chmod(0o600)
    env = {
        "PENSTOCK_GATEWAY_BIND": "127.0.0.1:0",
        "PENSTOCK_OPERATOR_KEY": "trust-log",
        "PENSTOCK_GATEWAY_TLS_CERT": str(tmp_path / "certificate.pem"),
        "PENSTOCK_GATEWAY_TLS_KEY": str(tmp_path / "key.pem"),
    }
    found = by_name(env)["certificate"]
    assert found.found.startswith("for 127.0.0.1; until ")
    assert found.remedy == f"renew {tmp_path}/certificate.pem"
    env["PENSTOCK_NODE_LOG_CA"] = str(tmp_path / "ca.pem")
    assert "task user" not in by_name(env), "the authority of nodes' logs is a gateway's setting"
    env["PENSTOCK_GATEWAY_BIND"] = "0.0.0.0:8742"
    assert "set PENSTOCK_TOKENS" in by_name(env)["certificate"].remedy
    node = {
        "PENSTOCK_NODE_LOG_TLS_CERT": str(tmp_path / "certificate.pem"),
        "PENSTOCK_NODE_LOG_TLS_KEY": str(tmp_path / "ca.key"),
    }
    wrong = by_name({**node, "PENSTOCK_LOG": "postgresql://127.0.0.1:9/p", "PENSTOCK_ALLOW_ROOT": "1"})[
        "certificate"
    ]
    assert "PENSTOCK_NODE_LOG_TLS_KEY" in wrong.found
    assert "is not the key" in wrong.found
    env["PENSTOCK_TOKENS"] = private(tmp_path / "tokens", "")
    assert "penstock token" in by_name(env)["tokens"].remedy


@contextmanager
def tls_server(folder: Path) -> Iterator[int]:
    """Its port on 127.0.0.1, with the certificate of this folder."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "broker.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_each_way_to_refuse_a_certificate_has_its_own_remedy(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another authority, another name, its end, a server that is away: to look for the authority helps
    against the first alone."""
    monkeypatch.setattr(reach, "REACH_S", 3_600.0)
    make_certificates(tmp_path)
    ca = str(tmp_path / "ca.pem")
    with tls_server(tmp_path) as port:

        def found(host: str, authority: str) -> Finding:
            return certificate_of("certificate", host, port, client_context(authority, "CA"))

        assert "renew" in found("127.0.0.1", ca).remedy, "it has a day"
        assert "names localhost" in found("localhost", ca).remedy
        assert "name the authority" in found("127.0.0.1", SYSTEM_CA).remedy
        without_ca = list(_kafka_certificate(f"kafka://127.0.0.1:{port}", [("127.0.0.1", port)]))
        assert [finding.found for finding in without_ca] == [f"127.0.0.1:{port}: it speaks TLS"]
        away = certificate_of("certificate", "127.0.0.1", closed_port, client_context(ca, "CA"))
        assert (away.found, away.remedy.partition(",")[0]) == (
            f"127.0.0.1:{closed_port}: Connection refused",
            "start it",
        )
        servers = [("a", f"https://127.0.0.1:{port}"), ("b", f"http://127.0.0.1:{closed_port}")]
        reached, tls, refused = log_server_findings([*servers, ("c", f"http://127.0.0.1:{port}")], ca)
    assert (reached.found, tls.what) == ("fetched from 1 of 3 ready nodes", "output of a"), (
        "a is to be renewed"
    )
    assert (refused.what, refused.found) == ("output of b", f"127.0.0.1:{closed_port}: Connection refused")
    assert "PENSTOCK_NODE_LOG_BIND" in refused.remedy
    assert "renew" in _for_verdict(EXPIRED, "store")


def test_options_of_a_node_are_read_as_its_program_reads_them(tmp_path: Path, closed_port: int) -> None:
    """A misspelt option ends the reporter with status 2, which systemd does not start again."""
    env = {
        "PENSTOCK_LOG": f"kafka://127.0.0.1:{closed_port}",
        "PENSTOCK_NODE_TOKEN_FILE": private(tmp_path / "token", "t"),
        "PENSTOCK_NODE_LOG_BIND": "0.0.0.0:87430",
        "PENSTOCK_ALLOW_ROOT": "1",
    }
    wrong = by_name(env | {"PENSTOCK_NODE_OPTIONS": "--virtual-gpu 2"})["options"]
    assert "PENSTOCK_NODE_OPTIONS" in wrong.found
    assert "--virtual-gpu" in wrong.found
    assert "penstock-node-reporter --help" in wrong.remedy
    assert (
        "--virtual-gpus': 99 is not in the range 0<=x<=16"
        in by_name(env | {"PENSTOCK_NODE_OPTIONS": "--virtual-gpus 99"})["options"].found
    )
    found = by_name(env | {"PENSTOCK_NODE_OPTIONS": "--virtual-gpus 2 --address 192.0.2.7 --rack 'r 1'"})
    assert found["GPUs here"] == Finding("GPUs here", "2 virtual ones, by --virtual-gpus")
    assert found["address"].found.startswith("192.0.2.7: no program here"), (
        "an option is more than a variable"
    )
    assert "87430: not HOST:PORT" in found["log server"].found
    assert "options" not in found
    assert by_name(env)["GPUs here"].remedy == "" or "--virtual-gpus 0" in by_name(env)["GPUs here"].remedy


def test_settings_are_read_as_a_service_reads_them(tmp_path: Path) -> None:
    """A number that is none, a URL that is none, and a service without a log: each ends its start."""
    wrong = by_name({"PENSTOCK_CELL_INDEX": "abc", "PENSTOCK_OPERATOR_KEY": "trust-log"})
    assert wrong["settings"] == Finding(
        "settings", "PENSTOCK_CELL_INDEX: 'abc' is not a number", "give 0 to 999"
    )
    assert "PENSTOCK_LOG_FILE" in wrong["log"].remedy
    url = by_name({"PENSTOCK_LOG": "kafka:/store:9093", "PENSTOCK_DSN": "store/penstock"})
    assert url["log"].remedy.startswith("use kafka://[user:password@]host:port")
    assert url["settings"].found.startswith("PENSTOCK_DSN")
    empty = by_name(
        {"PENSTOCK_LOG_FILE": private(tmp_path / "log", ""), "PENSTOCK_NODE_LOG_BIND": "0.0.0.0:0"}
    )
    assert "log" not in empty, "the file's own line has it"
    assert "it is empty" in empty["private file"].remedy
    archive = by_name({"PENSTOCK_NODE_LOG_ARCHIVE": "no-such-store://bucket"})["output's archive"]
    assert "no-such-store" in archive.found
    assert "the package of that store" in archive.remedy


def test_loopback_beside_other_addresses_is_found() -> None:
    """One of three nodes has the log's URL with 127.0.0.1, since the log is on its machine."""

    def node(name: str, address: str, status: str = "ready") -> dict[str, Any]:
        return {"node_id": name, "address": address, "status": status}

    others = [node("b", "10.0.0.2"), node("c", "10.0.0.3")]
    [found] = _addresses([node("a", "127.0.0.1"), *others])
    assert (found.what, found.found) == ("addresses", "loopback announced by a")
    assert "PENSTOCK_NODE_ADDRESS" in found.remedy
    assert list(_addresses([node("a", "127.0.0.1"), node("b", "::1")])) == [], "all on one machine"
    assert list(_addresses([node("a", "127.0.0.1", "gone"), *others])) == []


def test_the_answer_is_also_json_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A deployment's script asks it on each machine."""
    settings = tmp_path / "node.env"
    settings.write_text("PENSTOCK_NODE_ADDRESS=10.0.0.1:29500\nPENSTOCK_LOG=kafka://127.0.0.1:9\n")
    assert penstock(["--server", AWAY, "doctor", "--env-file", str(settings), "-o", "json"]) == 1
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["findings"]}
    assert rows["Python"]["well"]
    assert not rows["address"]["well"]
    assert rows["address"].keys() == {"what", "well", "found", "remedy"}
    assert rows["gateway"]["remedy"]
    settings.write_text("PENSTOCK_NODE_GATEWAY=http://127.0.0.1:7\n")
    assert penstock(["doctor", "--env-file", str(settings)]) == 1
    assert "no gateway at http://127.0.0.1:7" in capsys.readouterr().out
    settings.write_text("PENSTOCK_SERVER=http://127.0.0.1:8\nPENSTOCK_NODE_GATEWAY=http://127.0.0.1:7\n")
    assert penstock(["doctor", "--env-file", str(settings)]) == 1
    assert "no gateway at http://127.0.0.1:8" in capsys.readouterr().out
    settings.write_text("PENSTOCK_NODE_ADDRESS\n")
    assert penstock(["--server", AWAY, "doctor", "--env-file", str(settings)]) == 2
