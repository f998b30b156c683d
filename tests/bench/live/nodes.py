"""A process of fake nodes: `python -m tests.bench.live.nodes COUNT GPUS PATH`; until SIGTERM, then it writes
to PATH what it has seen (`tests.support.node_reporter.fake_nodes.Seen`), as JSON."""

import asyncio
import sys
from pathlib import Path

import msgspec

from penstock.log.open import open_log
from penstock.log.port import Log
from penstock.runtime.service import main
from penstock.runtime.settings import Settings
from tests.support.cluster.driver import node_spec
from tests.support.node_reporter.fake_nodes import FakeNodes

RACK = 32
RUN_MS = 4_000.0  # at 1,050 jobs/s of one GPU each, 4,200 of 8,000 GPUs are busy
BATCH_MS = 6  # one reader stands for a thousand nodes; each alone would rarely have two orders to gather


def fake_nodes(log: Log, count: int, gpus: int, run_ms: float) -> FakeNodes:
    """Nodes in racks of `RACK`; a task of theirs runs for `run_ms`."""
    specs = [node_spec(f"n{i:05}", gpus, rack=f"r{i // RACK:04}", cores=64) for i in range(count)]
    return FakeNodes(log, specs, run_ms=run_ms, batch_ms=BATCH_MS)


class NodesProcess:
    """A service, as penstock.runtime.service runs it."""

    def __init__(self, count: int, gpus: int, path: Path) -> None:
        self._count, self._gpus, self._path = count, gpus, path

    async def __call__(
        self,
        settings: Settings,
        stop: asyncio.Event,
        *,
        log: Log | None = None,
        ready: asyncio.Event | None = None,
    ) -> None:
        used = log or await open_log(settings.log_url, "node-reporter").start()
        nodes = fake_nodes(used, self._count, self._gpus, RUN_MS)
        running = asyncio.ensure_future(nodes.run())
        if ready is not None:
            ready.set()
        await stop.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        self._path.write_bytes(msgspec.json.encode(nodes.seen))
        await used.close()


if __name__ == "__main__":
    main("nodes", NodesProcess(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
