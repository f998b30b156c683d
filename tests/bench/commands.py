"""Processor time of one CLI command, user and system: `python -m tests.bench.commands`.

Each command is a process of its own, as a user starts it. A first run of each, which may compile modules,
does not count. The gateway is that of `penstock up`; what the gateway uses is not in the time.
"""

import asyncio
import os
import subprocess
import sys
from statistics import median

from tests.bench.live.submit import installation

REPEATS = 15
COMMANDS = {"help": ("--help",), "get_jobs": ("get", "jobs")}
"""Name in the figures → words of the command."""


def cpu_ms(words: tuple[str, ...], server: str) -> float:
    """One run of `penstock WORDS…`. Raises AssertionError if the command fails."""
    argv = [sys.executable, "-m", "penstock.cli.main", *words]
    env = {**os.environ, "PENSTOCK_SERVER": server}
    child = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, words
    return (used.ru_utime + used.ru_stime) * 1_000


def repeated(server: str, repeats: int) -> dict[str, list[float]]:
    """Command → ms of each run; the commands in turn."""
    for words in COMMANDS.values():
        cpu_ms(words, server)
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, words in COMMANDS.items():
            found[name].append(cpu_ms(words, server))
    return found


async def measure(repeats: int = REPEATS) -> dict[str, list[float]]:
    """As `repeated`, against a gateway that runs meanwhile."""
    async with installation("embedded") as (url, _):
        return await asyncio.to_thread(repeated, url, repeats)


if __name__ == "__main__":
    for command, times_ms in asyncio.run(measure()).items():
        print(f"{command}: least {min(times_ms):.0f} ms, median {median(times_ms):.0f} ms")
