"""From a URL to the log it names."""

from urllib.parse import unquote

from penstock.errors import ConfigurationError
from penstock.log.embedded import EmbeddedLog
from penstock.log.kafka import KafkaLog, Sasl
from penstock.log.port import Log

_FORMS = "kafka://[user:password@]host:port[,host:port] or postgresql://user:password@host:port/database"


def open_log(url: str, identity: str) -> Log:
    """The log, not yet started. `identity` names the service; on Kafka the URL's user is who it is to the broker.

    Raises `ConfigurationError`; the message never holds the password.
    """
    scheme, mark, rest = url.partition("://")
    if mark and scheme in ("postgresql", "postgres"):
        return EmbeddedLog(url, identity)
    if not mark or scheme != "kafka":
        raise ConfigurationError(f"a log URL begins with {scheme!r}; use {_FORMS}")
    credentials, at, address = rest.rstrip("/").rpartition("@")
    for host_and_port in address.split(","):
        host, _, port = host_and_port.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigurationError(f"{host_and_port!r} is not host:port; use {_FORMS}")
    if not at:
        return KafkaLog(address, identity)
    user, colon, password = credentials.partition(":")
    if not user or not colon:
        raise ConfigurationError(f"a name without a password before @{address}; use {_FORMS}")
    return KafkaLog(address, identity, sasl=Sasl(unquote(user), unquote(password)))
