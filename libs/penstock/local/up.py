"""`penstock up`: what is up is printed part by part; then it stays until it is interrupted."""

import asyncio
import time

from rich.console import Console

from penstock.local.options import DEFAULT_PORT, Options
from penstock.local.stack import running


async def up(options: Options) -> int:
    """Until cancelled. Raises what ended a part for good."""
    console = Console(highlight=False)
    start_s = last_s = time.perf_counter()

    def step(what: str, detail: str) -> None:
        nonlocal last_s
        now_s = time.perf_counter()
        if last_s == start_s:
            console.print(
                f"[bold]Penstock[/] on this machine; everything is kept in {options.folder}", soft_wrap=True
            )
        console.print(f"  [bold]{what:<10}[/] {detail:<52} [dim]{now_s - last_s:5.1f} s[/]")
        last_s = now_s

    def warn(text: str) -> None:
        console.print(f"  [yellow]![/] {text}", soft_wrap=True)

    try:
        async with running(options, warn, step) as stack:
            took_s = time.perf_counter() - start_s
            console.print(f"  [bold]{'gateway':<10}[/] [cyan]{stack.url}[/]")
            console.print(f"\n[green]Ready[/] after {took_s:.1f} s. In another terminal:\n")
            if options.port != DEFAULT_PORT:
                console.print(f"  export PENSTOCK_SERVER={stack.url}")
            console.print("  penstock submit -- python train.py\n  penstock top\n\nCtrl-C stops everything.")
            await stack.until_failure()
    except asyncio.CancelledError:
        console.print("\n  stopped; what happened is kept for the next `penstock up`")
        raise
    return 0
