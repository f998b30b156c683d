"""From a URL to the log it names."""

from urllib.parse import parse_qsl, unquote

from penstock.errors import ConfigurationError
from penstock.log.archive import Archive
from penstock.log.archived import ArchivedLog
from penstock.log.embedded import EmbeddedLog
from penstock.log.kafka import KafkaLog, Sasl
from penstock.log.port import Log
from penstock.redaction import brief, postgres_problem

_FORMS = (
    "kafka://[user:password@]host:port[,host:port][?ca=FILE] or postgresql://user:password@host:port/database"
)


def open_log(url: str, identity: str, archive: str | None = None) -> Log:
    """The log, not yet started. `identity` names the service; on Kafka the URL's user is who it is to the broker.

    `archive`: directory of the log's oldest records, which are read as part of it. Raises `ConfigurationError`; the message
    never holds the password.
    """
    log = _log(url, identity)
    return ArchivedLog(log, Archive(archive)) if archive else log


def _log(url: str, identity: str) -> Log:
    """`ca`: the connection is encrypted, and the broker proves its name by a certificate of the authorities in this PEM file,
    or of those that the machine trusts (`ca=system`).
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
    if not at:
        return KafkaLog(address, identity, ca=ca)
    user, colon, password = credentials.partition(":")
    if not user or not colon:
        raise ConfigurationError(f"a name without a password before @{address}; use {_FORMS}")
    return KafkaLog(address, identity, sasl=Sasl(unquote(user), unquote(password)), ca=ca)
