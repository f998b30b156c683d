"""`python -m penstock.local up|demo`: everything on this machine, until Ctrl-C or until the demo is over.

Exit status: 0 stopped as asked, or every demo job ended as expected · 1 a part failed for good, or a job ended
otherwise · 2 a setting is wrong · 130 the demo was interrupted.
"""

import signal

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Held back until they can be handled in order: the imports below take a moment.
signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

import argparse  # noqa: E402
import asyncio  # noqa: E402
import sys  # noqa: E402
from collections.abc import Awaitable, Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import uvloop  # noqa: E402

from penstock.errors import ConfigurationError, KernelError  # noqa: E402
from penstock.local import demo, options, up  # noqa: E402
from penstock.local.demo_jobs import checkout  # noqa: E402

EXIT_FAILED, EXIT_CONFIGURATION, EXIT_INTERRUPTED = 1, 2, 130


def main() -> None:
    """Never returns."""
    parser = argparse.ArgumentParser(prog="penstock", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    options.add_arguments(commands.add_parser("up", help="everything on this machine until Ctrl-C"))
    showing = commands.add_parser("demo", help="real training jobs on a fresh installation, about a minute")
    options.add_arguments(showing, folder=".penstock/demo")
    showing.add_argument("--jobs", metavar="CHECKOUT", help="the checkout that holds tilt/jobs")
    showing.add_argument("--keep", action="store_true", help="stay up after the summary, until Ctrl-C")
    showing.add_argument(
        "--picture", metavar="FILE.svg", type=Path, help="write the screen there as a picture"
    )
    arguments = parser.parse_args()
    if arguments.command == "up":
        chosen = options.options_from(arguments)
        sys.exit(uvloop.run(until_told(lambda: up.up(chosen), interrupted=0)))
    chosen = options.options_from(arguments, default_port=0)
    samples = checkout(arguments.jobs)
    sys.exit(
        uvloop.run(
            until_told(
                lambda: demo.demo(chosen, samples, keep=arguments.keep, picture=arguments.picture),
                interrupted=EXIT_INTERRUPTED,
            )
        )
    )


async def until_told(work: Callable[[], Awaitable[int]], *, interrupted: int) -> int:
    """Runs `work`; the first stop signal cancels it, further ones change nothing: the end is bounded in time."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, _cancel_once(task))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        return await task
    except asyncio.CancelledError:
        return interrupted
    except ConfigurationError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except KernelError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return EXIT_FAILED


def _cancel_once(task: "asyncio.Future[int]") -> Callable[[], None]:
    told = False

    def cancel() -> None:
        nonlocal told
        if not told:
            told = True
            task.cancel()

    return cancel


if __name__ == "__main__":
    main()
