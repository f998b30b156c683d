"""`python -m penstock_services.placer`: the placer as a process of its own; `… replay`: decide again from the log.

A replay prints one JSON object and exits with 0 when everything is identical, 1 when something differs,
2 on a wrong setting.
"""

import argparse
import asyncio
import sys
from dataclasses import asdict

import orjson

from penstock.errors import ConfigurationError, LogError
from penstock.log.open import open_log
from penstock.runtime.service import EXIT_CONFIGURATION, EXIT_FAILED
from penstock.runtime.service import main as serve
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.replay import Replayer, Report
from penstock_services.placer.shell.service import run


async def replay(settings: Settings, until: int | None, decision: str | None) -> Report:
    """Replays this cell's ledger through a connection of its own; progress goes to stderr."""
    log = await open_log(settings.log_url, "replay").start()
    try:
        return await Replayer(log, settings.cell_index).run(
            until, decision, lambda records: print(f"{records} records", file=sys.stderr, flush=True)
        )
    finally:
        await log.close()


def replay_command(arguments: list[str]) -> int:
    """The exit status; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m penstock_services.placer replay")
    parser.add_argument(
        "--until", type=int, metavar="SEQ", help="up to this ledger record; default: the last one"
    )
    parser.add_argument(
        "--decision", metavar="ID", help="a ledger seq or a job: show its record as decided again"
    )
    given = parser.parse_args(arguments)
    try:
        report = asyncio.run(replay(Settings.from_env(), given.until, given.decision))
    except ConfigurationError as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except (LogError, LookupError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_FAILED
    ok = report.different == 0
    print(orjson.dumps({"ok": ok, **asdict(report)}).decode())
    return 0 if ok else EXIT_FAILED


def main() -> None:
    """The service until SIGTERM, or a replay."""
    if sys.argv[1:2] == ["replay"]:
        sys.exit(replay_command(sys.argv[2:]))
    serve("placer", run)


if __name__ == "__main__":
    main()
