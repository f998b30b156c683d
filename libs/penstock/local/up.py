"""`penstock up`: starts the local installation, prints each part that is up,
and runs until it is interrupted."""

import asyncio
import os
import time

from penstock.local.options import DEFAULT_PORT, Options
from penstock.local.stack import running
from penstock.screen import console


async def up(options: Options) -> int:
    """Runs until cancelled. Raises the error that ended a part for good."""
    screen = console()
    start_s = time.perf_counter()
    screen.print(
        f"[bold]Penstock[/] on this machine; everything is stored in {options.folder}", soft_wrap=True
    )
    try:
        async with running(options, screen) as stack:
            took_s = time.perf_counter() - start_s
            screen.print(f"  [bold]{'gateway':<10}[/] [cyan]{stack.url}[/]")
            screen.print(f"\n[green]Ready[/] after {took_s:.1f} s. In another terminal:\n")
            encrypted = stack.url.startswith("https://")
            if options.port != DEFAULT_PORT or encrypted:
                screen.print(f"  export PENSTOCK_SERVER={stack.url}")
            if encrypted:
                screen.print(
                    "  export PENSTOCK_CA=FILE           # the authority that signed its certificate"
                )
            if os.environ.get("PENSTOCK_TOKENS"):
                screen.print("  export PENSTOCK_TOKEN_FILE=FILE   # a token that `penstock token` made")
            screen.print("  penstock submit -- python3 train.py\n  penstock top\n\nCtrl-C stops everything.")
            await stack.until_failure()
    except asyncio.CancelledError:
        screen.print("\n  stopped; what happened is stored for the next `penstock up`")
        raise
    return 0
