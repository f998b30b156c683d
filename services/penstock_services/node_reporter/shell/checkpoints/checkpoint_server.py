"""Server of checkpoints for the node on which the ledger has placed a job's next attempt: one path of the log
server.

`GET /v1/checkpoint?job=&token=&after=`. An order (`HandOverCheckpoint`) names the node that may fetch and its
public key, with which the request is signed; the answer ends with the digests of all files, signed with this
node's key.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import parse_qs

import msgspec

from penstock.model.decisions.orders import HandOverCheckpoint
from penstock.runtime.keys.node_keys import NodeKeys, signed_by
from penstock_services.node_reporter.shell.checkpoints.checkpoint_bundle import (
    Digests,
    Manifest,
    ending,
    pack,
    size_of,
)
from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import CheckpointFolders, age
from penstock_services.node_reporter.shell.link.log_server import Refused, Scope, Send

PATH = "/v1/checkpoint"
SCHEME = "Penstock"
SIZE = "penstock-bytes"
NAME = "penstock-checkpoint"
MAX_GIVEN = 4  # at once; each reads the disk

logger = logging.getLogger(__name__)


def asks(node_id: str, query: str) -> bytes:
    """The signed text of a request to this node."""
    return f"penstock checkpoint request\0{node_id}\n{query}".encode()


def answers(query: str, manifest: bytes) -> bytes:
    """The signed text of its answer."""
    return f"penstock checkpoint\0{query}\n".encode() + manifest


class CheckpointServer:
    """Of one node. `orders`: job → the latest order to hand its checkpoint over; `keys`: this node's."""

    def __init__(
        self,
        node_id: str,
        folders: CheckpointFolders,
        orders: Callable[[], Mapping[str, HandOverCheckpoint]],
        keys: Callable[[], NodeKeys],
    ) -> None:
        self._node_id, self._folders, self._orders, self._keys = node_id, folders, orders, keys
        self._given = 0

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Raises `Refused`."""
        query = scope["query_string"].decode("latin-1")
        order, after = self._asked(scope, query)
        if self._given >= MAX_GIVEN:
            raise Refused(503, f"{MAX_GIVEN} checkpoints are handed over already")
        self._given += 1
        try:
            found = await asyncio.to_thread(self._folders.newest, order.job_id, order.attempt, after)
            if found is None or age(found.name) < age(after):
                raise Refused(404, "it is not here any more")
            await self._send(found, query, send)
        except OSError as error:
            raise Refused(500, f"it cannot be read: {error}") from error
        finally:
            self._given -= 1

    def _asked(self, scope: Scope, query: str) -> tuple[HandOverCheckpoint, str]:
        """Raises `Refused`."""
        fields = {name: values[0] for name, values in parse_qs(query).items()}
        order = self._orders().get(fields.get("job", ""))
        if order is None or fields.get("token") != str(order.token):
            raise Refused(403, "no order to hand it over was read here yet")
        scheme, _, proof = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        if scheme != SCHEME.encode() or not signed_by(order.public_key, proof, asks(self._node_id, query)):
            raise Refused(403, f"the request is not signed by {order.to_node}")
        if age(fields.get("after", "")) == ():
            raise Refused(400, "after is not the name of a checkpoint")
        return order, fields["after"]

    async def _send(self, folder: Path, query: str, send: Send) -> None:
        size = await asyncio.to_thread(size_of, folder)
        digests: Digests = {}
        packed = pack(folder, digests)
        chunk = await asyncio.to_thread(next, packed, b"")
        headers = [
            (b"content-type", b"application/x-tar"),
            (SIZE.encode(), str(size).encode()),
            (NAME.encode(), folder.name.encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while chunk:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                chunk = await asyncio.to_thread(next, packed, b"")
        except OSError as error:  # without its end the receiver rejects it
            logger.warning("%s is not handed over: %s", folder, error)
            chunk = b""
        else:
            manifest = msgspec.json.encode(Manifest(folder.name, digests))
            chunk = ending(manifest, self._keys().sign(answers(query, manifest)))
        await send({"type": "http.response.body", "body": chunk})
