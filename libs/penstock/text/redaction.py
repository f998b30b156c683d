"""Redaction: URLs without their passwords, and values cut, for messages, logs, reports and traces.

The one place that decides what may be shown. It shows what it knows to be harmless and hides the rest: in a
URL that is not well-formed a password is easily taken for another part.
"""

import re
from urllib.parse import SplitResult, urlsplit

HIDDEN = "***"
SHOWN_PARAMETERS = frozenset(
    {"application_name", "ca", "database", "dbname", "host", "port", "sslmode", "user"}
)
"""Parameters of a URL's query whose values are shown. All others are hidden."""
MAX_SHOWN = 16  # characters of a given text: a size, a number or a choice; most secrets are longer

_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{0,30}://"  # bounded: a long argument is searched in linear time
_URL = re.compile(rf"{_SCHEME}[^\s'\"]+")
_BEGIN = re.compile(rf"({_SCHEME})(.*)\Z", re.DOTALL)
_QUOTED = re.compile(r"(?P<mark>['\"])(?!<).{3,}?(?P=mark)", re.DOTALL)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#\[\]@]*)(:[0-9]{1,5})?\Z")


def without_password(url: str) -> str:
    """The same URL with `***` for its password, and for a user without password, which may be a token (but
    not for Postgres).

    What follows the last `@` is the address, so that a password may hold any character. What is not a URL is
    hidden whole.
    """
    found = _BEGIN.match(url)
    if found is None:
        return HIDDEN
    scheme, rest = found.groups()
    credentials, at, address = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    if at:
        known = colon or scheme.lower().startswith("postgres")
        name = user if known and re.fullmatch(r"[\w.%-]*", user) else HIDDEN
        at = f"{colon and ':' + HIDDEN}@"
    else:
        name = ""
    place, query_mark, query = address.partition("?")
    place = place.partition("#")[0]
    return f"{scheme}{name}{at}{_place(place)}{query_mark}{_query(query)}"


def without_passwords(text: str) -> str:
    """The text with `without_password` applied to every URL in it."""
    return _URL.sub(lambda found: without_password(found[0]), text)


def brief(value: object) -> str:
    """A given value for a message: numbers and short texts as they are, others by their length."""
    if isinstance(value, bool | None):
        return repr(value)
    if isinstance(value, int | float):
        text = repr(value) if not isinstance(value, int) or value.bit_length() <= 64 else ""
        return text or f"a number of {value.bit_length()} bits"  # type: ignore[union-attr]
    if isinstance(value, str):
        return repr(value) if len(value) <= MAX_SHOWN else f"a text of {len(value)} characters"
    return f"a {type(value).__name__}"


def unquoted(message: str) -> str:
    """A parser's message without its quotations from the text;
    the parser's own tokens stay (`','`, `'<block end>'`)."""
    return _QUOTED.sub("…", message)


def postgres_problem(dsn: str) -> str | None:
    """Why this URL of a Postgres database is not usable, with the remedy and without the URL; None: it is
    usable.

    A client that is given such a URL takes a part of the password for a port or a host, and shows it.
    """
    if not dsn.startswith(("postgresql://", "postgres://")):
        return "is not a URL; give postgresql://user:password@host:port/database"
    encode = "write special characters of the password as %XX, such as %2F for / and %40 for @"
    try:
        parts: SplitResult = urlsplit(dsn)
    except ValueError:
        return f"is not a well-formed URL; {encode}"
    credentials, _, address = parts.netloc.rpartition("@")
    hosts = address.split(",")
    if "@" in credentials or parts.fragment or not all(map(_HOST.match, hosts)):
        return f"is not a well-formed URL; {encode}"
    if "@" in parts.path or any("=" not in word for word in parts.query.split("&") if word):
        return f"is not a well-formed URL; {encode}"
    return None


def _place(text: str) -> str:
    """Hosts and path; hidden if a host is not valid, as in `user:password` without an address."""
    hosts, slash, path = text.partition("/")
    fits = all(map(_HOST.match, hosts.split(",")))
    return f"{hosts}{slash}{path}" if fits else HIDDEN


def _query(text: str) -> str:
    found = (word.partition("=") for word in text.split("&"))
    return "&".join(
        f"{name}={value if name in SHOWN_PARAMETERS else HIDDEN}" if mark else HIDDEN if name else ""
        for name, mark, value in found
    )
