"""A process that reads windows by Faust and prints them, one JSON array of windows a line: first all, then what changes.

    python -m tests.support.window_process kafka://127.0.0.1:9092 CELL
"""

import sys

import uvloop

from penstock.log.kafka import KafkaLog
from penstock.log.open import open_log
from penstock_services.contention_guard.shell.faust_windows import FaustWindows, encoded


async def main(url: str, cell_index: int) -> None:
    """Until it is killed."""
    log = open_log(url, "contention-guard")
    assert isinstance(log, KafkaLog)
    windows = FaustWindows(log, cell_index)
    found = await windows.begin()
    while True:
        print(encoded(found).decode(), flush=True)
        found = await windows.read()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2])))
