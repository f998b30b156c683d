"""Factory of logs: makes the adapter that a URL names."""

import os
from urllib.parse import parse_qsl, unquote, urlsplit

from penstock.errors import ConfigurationError
from penstock.log.archive import Archive
from penstock.log.archived import ArchivedLog
from penstock.log.port import Log
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.text.redaction import brief, postgres_problem

POSTGRES_PORT = 5_432

_FORMS = (
    "kafka://[user:password@]host:port[,host:port][?ca=FILE] or postgresql://user:password@host:port/database"
)


def open_log(url: str, identity: str, archive: str | None = None) -> Log:
    """The log, not yet started. `identity` names the service; on Kafka the broker authenticates the URL's
    user.

    `archive`: directory of the log's oldest records, which are read as part of it. Raises
    `ConfigurationError`; the message never holds the password.
    """
    log = _log(url, identity)
    return ArchivedLog(log, Archive(archive)) if archive else log


def _log(url: str, identity: str) -> Log:
    """`ca`: the connection is encrypted, and the broker proves its name by a certificate of the authorities
    in this PEM file, or of those that the machine trusts (`ca=system`).
    """
    scheme, mark, rest = url.partition("://")
    if mark and scheme in ("postgresql", "postgres"):
        if (problem := postgres_problem(url)) is not None:
            raise ConfigurationError(f"the log's URL {problem}")
        return EmbeddedLog(url, identity)
    if not mark or scheme != "kafka":
        found = f"a log URL begins with {brief(scheme)}" if mark else "the log's URL has no ://"
        raise ConfigurationError(f"{found}; use {_FORMS}")
    credentials, at, address = rest.rpartition("@")
    address, _, query = address.partition("?")
    address = address.rstrip("/")
    options = dict(parse_qsl(query, keep_blank_values=True))
    ca = options.pop("ca", None)
    if options or ca == "":
        raise ConfigurationError(f"after ? in the log's URL: ca=FILE is the only option; use {_FORMS}")
    for host_and_port in address.split(","):
        host, _, port = host_and_port.rpartition(":")
        if not host or not port.isdigit() or (":" in host and not host.startswith("[")):
            shown = "what follows kafka://" if ":" in host_and_port else repr(host_and_port)
            raise ConfigurationError(f"{shown} is not host:port; use {_FORMS}")
    from penstock.log.kafka.kafka import KafkaLog, Sasl  # a quarter of a node-reporter's start

    if not at:
        return KafkaLog(address, identity, ca=ca)
    user, colon, password = credentials.partition(":")
    if not user or not colon:
        raise ConfigurationError(f"a name without a password before @{address}; use {_FORMS}")
    return KafkaLog(address, identity, sasl=Sasl(unquote(user), unquote(password)), ca=ca)


def log_hosts(url: str) -> list[tuple[str, int]]:
    """Host and port of each of the log's servers, for a URL that `open_log` accepts. None for a socket in a
    folder of this machine, and for a log in memory.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "kafka":
        address = rest.rpartition("@")[2].partition("?")[0].rstrip("/")
        pairs = (place.rpartition(":") for place in address.split(","))
        return [(host.strip("[]"), int(port)) for host, _, port in pairs]
    if scheme not in ("postgresql", "postgres"):
        return []
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    places = (parts.netloc.rpartition("@")[2] or options.get("host") or os.environ.get("PGHOST", "")).split(
        ","
    )
    ports = (options.get("port") or os.environ.get("PGPORT") or str(POSTGRES_PORT)).split(",")
    found = []
    for number, place in enumerate(places):
        host, colon, port = (
            place.rpartition(":") if not place.endswith("]") and ":" in place else (place, "", "")
        )
        if host and not host.startswith(("/", "%2F", "%2f")):
            default = ports[min(number, len(ports) - 1)]
            found.append((host.strip("[]"), int(port if colon else default)))
    return found
