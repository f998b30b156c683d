"""Secret detection: finds texts in a job's variables and arguments that look like passwords, tokens or keys,
with a remedy.

It is a heuristic that only warns: by a variable's name, by the known forms of providers' tokens, by a
password inside a URL, and by entropy: random text has more than 4 bits per character (Shannon), words and
paths have less.

The gateway checks each submission on its event loop: a search takes time linear in the length of any text.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

NAME = re.compile(
    r"(^|_)(token|secret|passw(or)?d|passphrase|pwd|api_?key|access_?key|private_?key|credentials?|auth)"
    r"(_|$)",
    re.IGNORECASE,
)
FORM = re.compile(
    r"AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|glpat-[\w-]{20,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}"
    r"|(?<![\w-])eyJ[\w-]{10,}\.[\w-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
USERINFO = re.compile(r"[a-z][a-z0-9+.-]{0,30}://[^/@\s:]*:[^/@\s]+@", re.IGNORECASE)
RANDOM = re.compile(r"[A-Za-z0-9+/_=-]{24,}\Z")
MIN_ENTROPY = 4.0  # bits per character; hexadecimal text has at most 4, English about 3.5 at such lengths
ASSIGNED = re.compile(r"(?:^|[\s;&])([A-Za-z_]\w{0,63})=['\"]?([^\s;&|'\"$]+)")
"""`NAME=value` in a script; a value that begins with `$` comes from elsewhere."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
HARMLESS = re.compile(r"(true|false|yes|no|none|\d*)\Z", re.IGNORECASE)


def suspicions(
    env: Mapping[str, str], command: Sequence[str] = (), secrets: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, str]]:
    """(field, reason) of each text that looks like a secret, never the text itself. `secrets`: variable →
    name of a secret."""
    for name, value in env.items():
        if (why := _why(name, value)) is not None:
            yield f"env.{name}", why
    for number, word in enumerate(command):
        if (why := _form(word) or _assigned(word)) is not None:
            yield f"command.{number}", why
    for name, secret in secrets.items():
        if FORM.search(secret) or _is_random(secret):
            yield f"secrets.{name}", "it is not a name, but has the form of a token or key"


def remedy(field: str) -> str:
    """The remedy for a secret in this field."""
    section, _, name = field.partition(".")
    variable = name if section in ("env", "secrets") else "NAME"
    return (
        f"give the nodes the secret and write `{variable}: {{secret: name-of-it}}` under env, or --secret "
        f"{variable}=name-of-it; what stands here is in the ledger for ever"
    )


def _why(name: str, value: str) -> str | None:
    if NAME.search(name) and HARMLESS.match(value) is None:
        return "its name is that of a secret"
    return _form(value) or ("it looks random" if _is_random(value) else None)


def _assigned(script: str) -> str | None:
    """Why a value that a script's text gives to a variable looks like a secret."""
    if re.search(r"\s", script) is None:
        return None
    found = (NAME.search(name) and HARMLESS.match(value) is None for name, value in ASSIGNED.findall(script))
    return "it sets a variable with the name of a secret" if any(found) else None


def _form(text: str) -> str | None:
    if FORM.search(text):
        return "it has the form of a token or key"
    return "it is a URL with a password" if USERINFO.search(text) else None


def _is_random(text: str) -> bool:
    if RANDOM.match(text) is None or text.count("/") > 2 or UUID.search(text):
        return False
    kinds = (any(map(test, text)) for test in (str.isdigit, str.islower, str.isupper))
    counts = Counter(text).values()
    entropy = -sum(count / len(text) * math.log2(count / len(text)) for count in counts)
    return sum(kinds) == 3 and entropy >= MIN_ENTROPY
