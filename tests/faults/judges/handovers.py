"""Checkpoints between two nodes, with real folders and keys: random askers, answers of impostors, changed
bytes.

Rule `handover`: whom the ledger names gets a checkpoint, and nobody else; what a node takes is what the named
node has signed, whole, and no older than the ledger knows.
"""

import asyncio
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode

import msgspec
import numpy as np

from penstock.errors import PenstockError
from penstock.model.decisions.orders import CheckpointSource, HandOverCheckpoint
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.node_reporter.shell.checkpoints.checkpoint_bundle import (
    Digests,
    Manifest,
    ending,
    pack,
)
from penstock_services.node_reporter.shell.checkpoints.checkpoint_fetch import (
    CheckpointFetcher,
    Place,
    Stream,
)
from penstock_services.node_reporter.shell.checkpoints.checkpoint_folders import CheckpointFolders
from penstock_services.node_reporter.shell.checkpoints.checkpoint_server import (
    SCHEME,
    CheckpointServer,
    answers,
    asks,
)
from penstock_services.node_reporter.shell.link.log_server import Refused
from tests.faults.judges.cell_rules import Broken
from tests.support.node_reporter.node_cell import node_options, start_order

STEPS = 16
JOB, TOKEN, ATTEMPT = "job-1", 7, 2
KNOWN, OLDER = "attempt-1-iteration-70", "attempt-1-iteration-30"


class Handovers:
    """n1 has the checkpoints, n2 is to have them; n3 asks and answers, too."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = np.random.default_rng(seed)
        self.keys = {name: NodeKeys(self.rng.bytes(32)) for name in ("n1", "n2", "n3")}
        self.folders = {}
        for name in ("n1", "n2"):
            self.folders[name] = CheckpointFolders(node_options(folder / name, node_id=name), None)
            self.folders[name].make()
        for name in (OLDER, KNOWN):
            saved = self.folders["n1"].of(JOB) / name
            saved.mkdir(parents=True)
            (saved / "weights").write_bytes(self.rng.bytes(3_000))
        self.order = HandOverCheckpoint(
            token=TOKEN,
            node_id="n1",
            job_id=JOB,
            attempt=ATTEMPT,
            to_node="n2",
            public_key=self.keys["n2"].public_key,
        )
        self.server = CheckpointServer(
            "n1", self.folders["n1"], lambda: {JOB: self.order}, lambda: self.keys["n1"]
        )
        options = node_options(folder / "n2", node_id="n2")
        self.fetcher = CheckpointFetcher(options, self.folders["n2"], lambda: self.keys["n2"])

    async def play(self) -> None:
        """Raises `Broken`."""
        for _ in range(STEPS):
            await self._asks()
            self._takes()

    # --------------------------------------------------------------------------------- who asks

    async def _asks(self) -> None:
        asker = str(self.rng.choice(["n2", "n2", "n3", "nobody"]))
        token = TOKEN if self.rng.random() < 0.7 else TOKEN - 1
        query = urlencode({"job": JOB, "token": token, "after": KNOWN})
        signed = query if self.rng.random() < 0.8 else urlencode({"job": JOB, "token": token, "after": OLDER})
        proof = (
            b""
            if asker == "nobody"
            else f"{SCHEME} {self.keys[asker].sign(asks('n1', signed)).decode()}".encode()
        )
        scope: Any = {"query_string": query.encode(), "headers": [(b"authorization", proof)]}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        right = (asker, token, signed) == ("n2", TOKEN, query)
        try:
            await self.server(scope, send)
            given = True
        except Refused:
            given = False
        if given is not right:
            raise Broken(
                f"handover: {asker} asks with token {token}, and is{'' if given else ' not'} given it"
            )

    # --------------------------------------------------------------------------------- who answers

    def _takes(self) -> None:
        name = KNOWN if self.rng.random() < 0.8 else OLDER
        by = "n1" if self.rng.random() < 0.8 else "n3"
        query = urlencode({"job": JOB, "token": TOKEN, "after": KNOWN})
        digests: Digests = {}
        body = bytearray(b"".join(pack(self.folders["n1"].of(JOB) / name, digests)))
        manifest = msgspec.json.encode(Manifest(name, digests))
        changed = self.rng.random() < 0.2
        if changed:
            body[600 + int(self.rng.integers(2_000))] ^= 1
        data = bytes(body) + ending(manifest, self.keys[by].sign(answers(query, manifest)))
        cut = self.rng.random() < 0.15
        if cut:
            data = data[: int(self.rng.integers(len(body)))]
        source = CheckpointSource(
            node_id="n1", address="127.0.0.1", port=1, public_key=self.keys["n1"].public_key, size_bytes=3_000
        )
        place = Place(source, query, "", time.monotonic(), threading.Event())  # clock: a transfer's limit
        order = start_order(
            TOKEN, task_id=f"{JOB}.2.w0", job_id=JOB, attempt=ATTEMPT, node_id="n2", checkpoint=KNOWN
        )
        right = not changed and not cut and (name, by) == (KNOWN, "n1")
        try:
            found = self.fetcher._stored(order, place, Stream(iter([data]), place, lambda: None))
        except PenstockError:
            taken = False
        else:
            taken = True
            self.folders["n2"].discard(JOB)
            if found.name != KNOWN:
                raise Broken(f"handover: {found.name} is taken for {KNOWN}")
        if taken is not right:
            what = f"{name} of {by}{', changed' * changed}{', cut short' * cut}"
            raise Broken(f"handover: {what} is{'' if taken else ' not'} taken")


def play(seed: int) -> None:
    """Raises `Broken`."""
    with TemporaryDirectory() as folder:
        asyncio.run(Handovers(seed, Path(folder)).play())
