"""The gateway's own settings.

| variable | meaning | default |
|---|---|---|
| `PENSTOCK_GATEWAY_BIND` | `host:port` to listen on | `127.0.0.1:8742` |
| `PENSTOCK_TOKEN_FILE` | bearer tokens, one per line, mode 0600; every request then needs one | none: loopback only |
| `PENSTOCK_GATEWAY_IN_FLIGHT` | requests that may wait for the log at once; beyond: 429 | `2000` |
| `PENSTOCK_LOG_DIR` | where the node-reporters of this machine write the tasks' output | none: no logs |
"""

import ipaddress
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.errors import ConfigurationError
from penstock.runtime.settings import EnvironmentSettings

DEFAULT_BIND = "127.0.0.1:8742"
MIN_TOKEN_CHARS = 16
MAX_TOKENS = 64
MAX_IN_FLIGHT = 2_000  # requests whose append is under way; one full batch of the log
ANSWER_WITHIN_S = 10.0  # for the log to acknowledge; then the client gets "outcome unknown"


@dataclass(frozen=True, slots=True)
class Options:
    """See the module's table."""

    host: str
    port: int
    tokens: tuple[bytes, ...] = ()
    log_dir: Path | None = None
    max_in_flight: int = MAX_IN_FLIGHT
    answer_within_s: float = ANSWER_WITHIN_S

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "Options":
        """Raises `ConfigurationError` that names the settings and the remedies."""
        found = _Variables.from_env(env)
        host, port = _host_and_port(found.gateway_bind)
        tokens = _tokens(found.token_file) if found.token_file is not None else ()
        if not tokens and not is_loopback(host):
            raise ConfigurationError(
                f"PENSTOCK_GATEWAY_BIND: {host} can be reached from other machines, and whoever reaches the gateway "
                "runs commands on the nodes; set PENSTOCK_TOKEN_FILE, or bind to 127.0.0.1"
            )
        return cls(host, port, tokens, found.log_dir, found.gateway_in_flight)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address; names other than localhost are not trusted."""
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
    token_file: Path | None = None
    log_dir: Path | None = None
    gateway_in_flight: int = Field(MAX_IN_FLIGHT, ge=1, title="give a number above 0")


def _tokens(path: Path) -> tuple[bytes, ...]:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = [line.strip() for line in file.read().splitlines()]
    except OSError as error:
        raise ConfigurationError(f"PENSTOCK_TOKEN_FILE: {path} cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigurationError(
            f"PENSTOCK_TOKEN_FILE: {path} has mode {mode:04o}, others can read it; run chmod 600 {path}"
        )
    found = tuple(line for line in lines if line)
    if not found or len(found) > MAX_TOKENS or any(len(token) < MIN_TOKEN_CHARS for token in found):
        raise ConfigurationError(
            f"PENSTOCK_TOKEN_FILE: {path} must hold 1 to {MAX_TOKENS} tokens, one per line, each of at least "
            f"{MIN_TOKEN_CHARS} characters"
        )
    return found
