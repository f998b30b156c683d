"""The gateway's own settings.

| variable | meaning | default |
|---|---|---|
| `PENSTOCK_GATEWAY_BIND` | `host:port` to listen on | `127.0.0.1:8742` |
| `PENSTOCK_TOKENS` | file of hashed bearer tokens with their roles (`core/access.py`), mode 0600, read again
when it changes; every request then needs one | none: loopback only, for the user who runs the gateway |
| `PENSTOCK_OPERATOR_KEY` | file of 32 random bytes, mode 0600, which the placer has, too: signs what
operators do to nodes. `trust-log`: the placer trusts every writer of its log | required |
| `PENSTOCK_GATEWAY_TLS_CERT` | PEM file: its certificate, then those between it and the authority; with it
the gateway speaks `https` only; SIGHUP reads both files again | none: `http` |
| `PENSTOCK_GATEWAY_TLS_KEY` | PEM file of the certificate's key, mode 0600, without a passphrase | none |
| `PENSTOCK_GATEWAY_IN_FLIGHT` | requests that may wait for the log at once; beyond: 429 | `2000` |
| `PENSTOCK_NODE_LOG_KEY` | file of 32 random bytes, mode 0600, which the node-reporters have, too:
authenticates readers of tasks' output. Not needed for nodes with a token in `PENSTOCK_TOKENS` | none |
| `PENSTOCK_NODE_LOG_CA` | PEM file of the authority of node-reporters that serve output with TLS; `system`:
those of this machine | `system` |
| `PENSTOCK_NODE_LOG_ARCHIVE` | folder (`file:///…`) or store (`s3://…`) of the output of tasks whose node is
gone, as the node-reporters have it | none |
| `PENSTOCK_CODE_DIR` | folder for the code that jobs are sent with (`--sync`), one for all gateways of a
cell; at most 16 GiB | none: no code |
"""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.errors import ConfigurationError
from penstock.runtime.http.http_limits import LIMITS, Limits
from penstock.runtime.keys.node_keys import operator_key
from penstock.runtime.settings import EnvironmentSettings
from penstock_services.gateway.shell.access.tls import CERTIFICATE, KEY, ServerCertificate
from penstock_services.gateway.shell.access.tokens import TokenFile

DEFAULT_BIND = "127.0.0.1:8742"
MAX_IN_FLIGHT = 2_000  # requests with an append under way; one full batch of the log
ANSWER_WITHIN_S = 10.0  # for the log to acknowledge; then the client gets "outcome unknown"


@dataclass(frozen=True, slots=True)
class Options:
    """See the module's table."""

    host: str
    port: int
    tokens: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    node_log_key: Path | None = None
    node_log_ca: Path | None = None
    node_log_archive: str | None = None
    code_dir: Path | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    answer_within_s: float = ANSWER_WITHIN_S
    operator_key: bytes | None = None
    http_limits: Limits = LIMITS

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Options":
        """Raises `ConfigurationError` that names the settings and the remedies."""
        found = _Variables.from_env(env)
        host, port = _host_and_port(found.gateway_bind)
        if found.tokens is not None:
            TokenFile(found.tokens)
        elif not is_loopback(host):
            raise ConfigurationError(
                f"PENSTOCK_GATEWAY_BIND: {host} can be reached from other machines, and whoever reaches the "
                "gateway runs commands on the nodes; set PENSTOCK_TOKENS (`penstock token` makes them), or "
                "bind to 127.0.0.1"
            )
        options = cls(
            host,
            port,
            tokens=found.tokens,
            certificate=found.gateway_tls_cert,
            key=found.gateway_tls_key,
            node_log_key=found.node_log_key,
            node_log_ca=found.node_log_ca,
            node_log_archive=found.node_log_archive,
            code_dir=found.code_dir,
            max_in_flight=found.gateway_in_flight,
            operator_key=operator_key(env),
        )
        options.tls()
        return options

    def tls(self) -> ServerCertificate | None:
        """From the present files; None: not encrypted. Raises `ConfigurationError`."""
        if self.certificate is None and self.key is None:
            return None
        if self.certificate is None or self.key is None:
            given, missing = (KEY, CERTIFICATE) if self.certificate is None else (CERTIFICATE, KEY)
            raise ConfigurationError(f"{missing} is not set, but {given} is; set both, or none for http")
        return ServerCertificate(self.certificate, self.key)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address; names other than localhost are not trusted."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _host_and_port(text: str) -> tuple[str, int]:
    """Raises `ValueError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{text!r} is not host:port, such as {DEFAULT_BIND}")
    return host, int(port)


def _checked_bind(text: str) -> str:
    _host_and_port(text)
    return text


class _Variables(EnvironmentSettings):
    gateway_bind: Annotated[str, AfterValidator(_checked_bind)] = DEFAULT_BIND
    tokens: Path | None = None
    gateway_tls_cert: Path | None = None
    gateway_tls_key: Path | None = None
    node_log_key: Path | None = None
    node_log_ca: Path | None = None
    node_log_archive: str | None = None
    code_dir: Path | None = None
    gateway_in_flight: int = Field(MAX_IN_FLIGHT, ge=1, title="give a number above 0")
