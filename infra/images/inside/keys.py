"""Secrets of `docker-compose.yml`: roles in Postgres, the operator's key, tokens for the user and each node.

    POSTGRES_USER=… POSTGRES_PASSWORD=… POSTGRES_DB=… python keys.py

All are made once, in OWN, and copied to a folder for each service, of which a container has only its own. May
be run at any time: what is there stays, and rights are brought up to date.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

OWN = Path("/var/lib/penstock")
"""The folder of this program, which no service sees."""
EACH = Path("/etc/penstock")
"""A folder for each service."""
RIGHTS = Path("/opt/penstock/share/acls.yaml")
SERVICES = ("batcher", "contention-guard", "estimator", "gateway", "migrator", "placer", "projector")
NODES = ("node-0", "node-1")
KEY_BYTES = 32
ROLES: Mapping[str, tuple[str, ...]] = {
    "user": ("--roles", "submit,read,operate", "--tenant", "user", "--name", "you"),
    **{node: ("--roles", "node,read", "--node", node, "--name", node) for node in NODES},
}
"""Owner of a token → options of `penstock token`."""


def main() -> int:
    prepare = [sys.executable, "-m", "penstock.local.postgres_setup", "--rights", str(RIGHTS)]
    prepare += ["--urls", str(OWN / "urls"), *(word for node in NODES for word in ("--node", node))]
    user, password, database = (quote(os.environ[f"POSTGRES_{part}"]) for part in ("USER", "PASSWORD", "DB"))
    dsn = f"postgresql://{user}:{password}@postgres:5432/{database}"
    done = subprocess.run(prepare, check=False, env={**os.environ, "PENSTOCK_DSN": dsn})
    if done.returncode:
        return done.returncode
    for name in SERVICES:
        give(OWN / "urls" / f"{name}.url", EACH / name / "dsn")
    key = OWN / "operator.key"
    if not key.exists():
        write(key, os.urandom(KEY_BYTES))
    for name in ("gateway", "placer"):
        give(key, EACH / name / "operator.key")
    for owner in ROLES:
        if not token_of(owner).exists():
            write(token_of(owner), made_token(ROLES[owner]))
    give(OWN / "tokens", EACH / "gateway" / "tokens")
    give(token_of("user"), EACH / "user" / "token")
    for node in NODES:
        give(OWN / "urls" / "nodes" / f"{node}.url", EACH / node / "log")
        give(token_of(node), EACH / node / "token")
    print("each service has its secrets")
    return 0


def made_token(options: tuple[str, ...]) -> bytes:
    """A new token, whose hash is among those for the gateway."""
    argv = ["penstock", "token", "--tokens", str(OWN / "tokens"), *options]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout


def token_of(owner: str) -> Path:
    return OWN / f"{owner}.token"


def give(source: Path, place: Path) -> None:
    """Copies a file, unless it is there."""
    content = source.read_bytes()
    if not place.exists() or place.read_bytes() != content:
        write(place, content)


def write(path: Path, content: bytes) -> None:
    """Whole or not at all, for this user alone."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
