"""`python -m penstock_services.placer`: the placer as a process of its own; `… replay`: decide again from the log.

A replay prints one JSON object and exits with 0 when everything is identical, 1 when something differs,
2 on a wrong setting.
"""

import argparse
import sys

import orjson

from penstock.errors import ConfigurationError, LogError
from penstock.runtime.service import EXIT_CONFIGURATION, EXIT_FAILED
from penstock.runtime.service import main as serve
from penstock.runtime.settings import Settings
from penstock_services.placer.shell.replay import replay
from penstock_services.placer.shell.service import run


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
        found = replay(Settings.from_env(), given.until, given.decision, _show_progress)
    except ConfigurationError as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except (LogError, LookupError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(orjson.dumps(found).decode())
    return 0 if found["ok"] else EXIT_FAILED


def _show_progress(records: int) -> None:
    print(f"{records} records", file=sys.stderr, flush=True)


def main() -> None:
    """The service until SIGTERM, or a replay."""
    if sys.argv[1:2] == ["replay"]:
        sys.exit(replay_command(sys.argv[2:]))
    serve("placer", run)


if __name__ == "__main__":
    main()
