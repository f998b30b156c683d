"""What an idle installation costs: every service and one node-reporter in one process, nothing to do.

`python -m tests.bench.services.idle FOLDER` is that process; it works until SIGTERM.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from penstock.log.open import open_log
from penstock.log.port import Log, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.runtime.keys.node_keys import key_file_at
from penstock.runtime.service import main
from penstock.runtime.settings import Settings
from tests.bench.machine import Cpu
from tests.bench.servers import process, servers

SETTLE_S = 5.0  # after the start, until the last of its own messages and rows are written


@dataclass(frozen=True, slots=True)
class Idle:
    rss_mib: float
    """Of the one process."""
    family_mib: float
    """Proportional set size of that process and its children (the node-reporter's launcher)."""
    postgres_mib: float
    """Proportional set size of all of Postgres."""
    messages_per_min: float
    cpu_percent: float
    """Of one core, the process and its children."""
    postgres_cpu_percent: float


async def measure(seconds: float, settle_s: float = SETTLE_S) -> Idle:
    async with servers("embedded") as found:
        log = await open_log(found.settings.log_url, "bench").start()
        await log.create(topic_partitions())
        argv = ["-m", "tests.bench.services.idle", str(found.folder / "node")]
        async with process("services", argv, found) as child:
            await asyncio.sleep(settle_s)
            pids = {"services": child.pid, **found.pids}
            cpu, before = Cpu(pids), await _records(log)
            await asyncio.sleep(seconds)
            used, after = cpu.used_s(), await _records(log)
            return Idle(
                rss_mib=psutil.Process(child.pid).memory_info().rss / 2**20,
                family_mib=_pss_mib(child.pid),
                postgres_mib=_pss_mib(found.pids["postgres"]),
                messages_per_min=(after - before) / seconds * 60,
                cpu_percent=used["services"] / seconds * 100,
                postgres_cpu_percent=used["postgres"] / seconds * 100,
            )


async def _records(log: Log) -> int:
    """On all topics together."""
    partitions = [Partition(topic, i) for topic, count in topic_partitions().items() for i in range(count)]
    return sum((await log.end_offsets(partitions)).values())


def _pss_mib(pid: int) -> float:
    """Of a process and its descendants: memory that they share counts once."""
    process_ = psutil.Process(pid)
    family = [process_, *process_.children(recursive=True)]
    return sum(one.memory_full_info().pss for one in family) / 2**20


async def _everything(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """The services as `penstock up` composes them, and a node-reporter beside them."""
    from penstock.local.services import all_services
    from penstock_services.node_reporter.options import Options
    from penstock_services.node_reporter.shell.run import runner

    folder = Path(sys.argv[1])
    os.environ["PENSTOCK_GATEWAY_BIND"] = "127.0.0.1:0"
    log_key = key_file_at(folder / "logs.key")
    os.environ["PENSTOCK_NODE_LOG_KEY"] = str(log_key)
    shared = await open_log(settings.log_url, "local").start()
    failed = asyncio.get_running_loop().create_future()
    async with all_services(settings, shared, folder / "services.log", failed):
        joined = asyncio.Event()
        options = Options(
            "node-0",
            folder / "state",
            folder / "logs",
            virtual_gpus=4,
            cores=8,
            allow_root=True,
            log_key=log_key,
        )
        node = asyncio.ensure_future(runner(options)(settings, stop, log=shared, ready=joined))
        await joined.wait()
        if ready is not None:
            ready.set()
        await stop.wait()
        await node
    await shared.close()


if __name__ == "__main__":
    main("services", _everything)
