"""What Faust costs: CPU time per sample of telemetry, beside the log's own reader, on a real Kafka.

    python -m tests.bench.services.telemetry_windows [--samples 20000] [--nodes 100]

CPU time, not wall time: other work on the machine disturbs it little. Faust's is that of its process without
its start (the same process with an empty topic); its broker's is left out.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import count
from typing import NamedTuple

import psutil

from infra.devservers.kafka import KafkaBroker, kafka_broker
from penstock.log.open import open_log
from penstock_services.contention_guard.shell.faust_windows import PROCESS, FaustWindows
from penstock_services.contention_guard.shell.windows import LogWindows
from tests.support.node_reporter.telemetry import load

IDLE_S = 20.0
BATCH = 2_000
SEED = 1

_cells = count()


class Read(NamedTuple):
    """What a first read of the whole topic took."""

    cpu_s: float
    wall_s: float


async def write(url: str, samples: int, nodes: int) -> int:
    """Returns how many records that are."""
    log = await open_log(url, "node-reporter").start()
    messages = list(load(SEED, samples, [f"node-{number}" for number in range(nodes)]))
    for begin in range(0, len(messages), BATCH):
        await log.append(messages[begin : begin + BATCH])
    await log.close()
    return len(messages)


async def by_our_reader(url: str) -> Read:
    log = await open_log(url, "contention-guard").start()
    windows = LogWindows(log)
    began_s, cpu_s = time.perf_counter(), time.process_time()
    await windows.begin()
    found = Read(time.process_time() - cpu_s, time.perf_counter() - began_s)
    await windows.close()
    await log.close()
    return found


def cpu_of_faust_s() -> float:
    [process] = [child for child in psutil.Process().children() if PROCESS in child.cmdline()]
    return sum(process.cpu_times()[:2])


async def by_faust(
    url: str, cell: int, then: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
) -> Read:
    """A guard of this cell from its start until it has read everything; then what is done while it waits for
    more."""
    windows = FaustWindows(url, cell)
    began_s = time.perf_counter()
    await windows.begin()
    found = Read(cpu_of_faust_s(), time.perf_counter() - began_s)
    await then()
    await windows.close()
    return found


async def idle() -> None:
    """Prints what Faust takes while nothing happens."""
    before_s = cpu_of_faust_s()
    await asyncio.sleep(IDLE_S)
    print(f"idle: {1_000 * (cpu_of_faust_s() - before_s) / IDLE_S:.1f} ms of CPU per second")


async def measure(broker: KafkaBroker, samples: int, nodes: int) -> None:
    url, cell = broker.url(), next(_cells)
    empty = await by_faust(url, next(_cells), idle)
    records = await write(url, samples, nodes)
    ours, faust = await by_our_reader(url), await by_faust(url, cell)
    again = await by_faust(url, cell)
    ours_us, faust_us = (1e6 * cpu_s / records for cpu_s in (ours.cpu_s, faust.cpu_s - empty.cpu_s))
    print(f"{records} samples of {nodes} nodes")
    print(f"log's reader: {ours_us:.0f} µs of CPU per sample, {ours.wall_s:.1f} s in all")
    print(
        f"Faust: {faust_us:.0f} µs of CPU per sample ({faust_us / ours_us:.0f} ×), {faust.wall_s:.1f} s in "
        "all"
    )
    print(
        f"Faust's start: {empty.cpu_s:.1f} s of CPU, {empty.wall_s:.1f} s; from the changelog "
        f"{again.wall_s:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=100)
    arguments = parser.parse_args()
    with kafka_broker() as broker:
        broker.create_topics()
        asyncio.run(measure(broker, arguments.samples, arguments.nodes))


if __name__ == "__main__":
    main()
