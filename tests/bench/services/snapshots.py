"""Longest stall of an event loop while a snapshot is written and read: `python -m
tests.bench.services.snapshots [JOBS]`.

A cell with so many jobs in its queue (50,000 by default). A task on the loop sleeps 1 ms again and again; the
longest time between two of its turns is the stall. `one call`: encoding and decoding on the loop itself.
`digest`: of the state, which the placer computes on its loop in every `DIGEST_EVERY`-th record.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from hashlib import sha256

from penstock.ledger.replica.digest import digest
from penstock.ledger.replica.replica import Replica
from penstock.runtime.following import snapshots
from penstock.runtime.following.snapshots import Stored
from tests.support.cluster.hand_placer import HandPlacer

JOBS = 50_000
ROUNDS = 3
TICK_S = 0.001


def large_cell(jobs: int) -> Replica:
    """One in which so many jobs wait."""
    placer = HandPlacer()
    for number in range(jobs):
        placer.submit(f"job-{number:06d}", gpus=2)
    placer.replica.head_offset = len(placer.values) - 1
    return placer.replica


async def stall_ms(work: Callable[[], Awaitable[object]]) -> float:
    """The longest of `ROUNDS` runs of `work`, in milliseconds."""
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            longest_s = max(longest_s, time.perf_counter() - began_s - TICK_S)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(TICK_S)
    for _ in range(ROUNDS):
        await work()
        await asyncio.sleep(TICK_S)
    ticking.cancel()
    return longest_s * 1_000


async def measure(jobs: int) -> dict[str, float]:
    """Stalls in milliseconds."""
    replica = large_cell(jobs)
    body = snapshots._packed(replica.state)
    head = replica.head
    stored = Stored(head.seq, head.id, head.term, replica.head_offset, sha256(body).hexdigest(), body)

    async def write_here() -> None:
        snapshots._packed(replica.state)

    async def read_here() -> None:
        snapshots.restore(stored)

    async def digest_here() -> None:
        digest(replica.state)

    return {
        "digest": await stall_ms(digest_here),
        "idle": await stall_ms(lambda: asyncio.sleep(0.5)),
        "write, one call": await stall_ms(write_here),
        "write": await stall_ms(lambda: asyncio.to_thread(snapshots._packed, replica.state)),
        "read, one call": await stall_ms(read_here),
        "read": await stall_ms(lambda: snapshots.restored(stored)),
    }


if __name__ == "__main__":
    for name, found_ms in asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else JOBS)).items():
        print(f"{name:<16} {found_ms:6.1f} ms")
