"""Answers of the gateway about states of small cells: `why`, `queue`, `eta` and `deadlines`.

Each ledger of `tests.replay.workloads` is folded up to records spread over the ledger, at which jobs wait.
There the gateway's own application is asked, by the paths of its HTTP interface, with an operator's token.
Its clock stands some seconds behind the last record. Its tables are empty: what only they have is null.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import orjson

from penstock.ledger.replica.replica import Replica
from penstock.ledger.state.state import CellState
from penstock_services.gateway.core.access import Caller, Role, token_line
from penstock_services.gateway.shell.app import build_app
from penstock_services.gateway.shell.replica.follower import Follower
from tests.replay.workloads import ledger

KINDS = ("why", "queue", "eta", "deadlines")
PROFILES = (
    "penstock",
    "liquid",
    "genie",
    "coda",
    "srtf",
    "muri-s",
    "fifo",
    "tiresias",
    "muri-l",
    "drf",
)
STATES = {"shapes": 5, "arrays": 3, "stages": 3, "bursts": 3, "disturbed": 3, "hostile": 3}
"""Ledger → number of its states: 20 under each profile, 200 in all."""
WAITING, HOLDING = 3, 2
"""Number of jobs of each state that are asked about one by one; the queue answers about all that wait."""
LATER_MS = 7_321
TOKEN = "pst_golden"


@lru_cache(2)
def answers(profile: str) -> Mapping[str, Sequence[bytes]]:
    """Kind → the answers about a profile's states in order, each with its path and canonical body."""
    found: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    gateway = SimpleNamespace(store=_EmptyTables())
    with _application(gateway) as application:
        for name, states in STATES.items():
            values = ledger(name, profile)
            stops, follower = set(_stops(values, states)), _Follower(Replica())
            gateway.follower = follower
            for offset, value in enumerate(values):
                follower.replica.take(value, offset, follower._fold)
                if offset in stops:
                    for kind, path in _paths(follower.state):
                        body = asyncio.run(_get(application, path))
                        found[kind].append(f"{name} {offset} {path} ".encode() + _canonical(body))
    return found


def _stops(values: Sequence[bytes], states: int) -> Iterator[int]:
    """Offsets of so many records after which jobs wait, spread evenly over all such records."""
    replica, waiting = Replica(), []
    for offset, value in enumerate(values):
        replica.take(value, offset)
        if replica.state.queue:
            waiting.append(offset)
    assert len(waiting) >= states, "hardly any job waits: such states show no reasons"
    yield from (waiting[(2 * number + 1) * len(waiting) // (2 * states)] for number in range(states))


def _paths(state: CellState) -> Iterator[tuple[str, str]]:
    """(kind, path) of each question about one state."""
    yield "queue", "/v1/queue?limit=1000"
    yield "deadlines", "/v1/deadlines?limit=1000"
    waiting = _spread(list(state.queue.values()), WAITING)
    holding = _spread([job.job_id for job in state.holding.values()], HOLDING)
    for job_id in (*waiting, *holding):
        yield "why", f"/v1/jobs/{job_id}/why"
    for job_id in (*waiting[:1], *holding):
        yield "eta", f"/v1/jobs/{job_id}/eta"


def _spread(jobs: Sequence[str], most: int) -> Sequence[str]:
    """At most so many of these, ≥ 2, evenly, first and last among them."""
    if len(jobs) <= most:
        return jobs
    return [jobs[number * (len(jobs) - 1) // (most - 1)] for number in range(most)]


async def _get(application: Any, path: str) -> bytes:
    """The body of the answer to GET. Raises `AssertionError` unless it is 200."""
    plain, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": plain,
        "raw_path": plain.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"gateway"), (b"authorization", f"Bearer {TOKEN}".encode())],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await application(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent)
    assert sent[0]["status"] == 200, f"{path}: {body.decode()}"
    return body


def _canonical(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)


class _Follower(Follower):
    """A gateway's replica whose clock stands."""

    def now_ms(self) -> int:
        return self.state.now_ms + LATER_MS


class _EmptyTables:
    """A store of read models into which nothing was projected."""

    async def projected(self, seq: int, within_s: float) -> None:
        """As if it were."""

    async def row(self, query: str, *arguments: Any) -> None:
        """No row."""

    async def rows(self, query: str, *arguments: Any) -> Sequence[str]:
        """No rows."""
        return ()


@contextmanager
def _application(gateway: Any) -> Iterator[Any]:
    """The ASGI application of this gateway, which knows one operator's token."""
    operator = Caller(frozenset({Role.READ, Role.OPERATE}), name="golden")
    with TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        tokens.touch(0o600)
        tokens.write_text(token_line(TOKEN, operator))
        gateway.options = SimpleNamespace(tokens=tokens)
        yield build_app(gateway)
