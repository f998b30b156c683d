"""`penstock demo`: a fresh installation, a dozen and a half real training jobs, a live table, a summary.

The demo is a user like any other: it submits, watches and asks why through the gateway.
"""

import os
import shutil
import time
from pathlib import Path
from types import MappingProxyType

from penstock.errors import ConfigurationError
from penstock.local.demo.demo_cases import case_of
from penstock.local.demo.demo_drive import DemoFailed, drive
from penstock.local.demo.demo_jobs import DEVICES
from penstock.local.demo.demo_screen import Show, print_summary, save_picture
from penstock.local.lock import folder_lock
from penstock.local.options import DemoOptions
from penstock.local.stack import OWN_FOLDERS, running
from penstock.runtime.race import first_of
from penstock.screen import console as make_console

LIMIT_S = 3_600.0  # something hangs: it takes two minutes, and many on a machine that has much else to do
SETTINGS = MappingProxyType(
    {"PENSTOCK_UNSCHEDULABLE_GRACE_MS": "3000"}  # the default, 5 minutes, leaves time for a node to join
)
ACCESS = ("PENSTOCK_TOKENS", "PENSTOCK_GATEWAY_TLS_CERT", "PENSTOCK_GATEWAY_TLS_KEY")
"""Settings of another gateway in this shell: the demo's own is for the user who runs it."""


async def demo(options: DemoOptions) -> int:
    """0 when every job ended as expected, else 1."""
    case = case_of(options)
    options = case.options
    start_fresh(options.folder)
    console = make_console()
    for name in ACCESS:
        os.environ.pop(name, None)
    for name, value in {**SETTINGS, **case.environment}.items():
        os.environ.setdefault(name, value)
    began_s = time.perf_counter()
    console.print(f"[bold]Penstock demo[/]: {case.headline}", markup=True, soft_wrap=True)
    console.print(f"[dim]everything is stored in {options.folder}[/]\n", soft_wrap=True)
    async with running(options, console) as stack:
        console.print()
        show = Show(console, len(case.jobs))
        show.others = case.others
        part = None if case.part is None else case.part(show.say)
        show.word = "" if part is None else part.WORD
        work = drive(stack.url, case.jobs, part, show)
        if not await first_of(work, stack.until_failure(), timeout_s=LIMIT_S):
            late = ", ".join(job.spec.name for job_id, job in show.jobs.items() if job_id not in show.ended)
            raise DemoFailed(f"not over after {LIMIT_S:.0f} s: {late or 'jobs not submitted'}")
        took_s = time.perf_counter() - began_s
        differences = print_summary(show, took_s, options.folder, console)
        if options.picture is not None:
            save_picture(show, took_s, options.folder, options.picture)
        if options.keep:
            console.print(f"\nStill up at {stack.url}; Ctrl-C ends it.")
            await stack.until_failure()
    return 1 if differences else 0


def start_fresh(folder: Path) -> None:
    """Removes an earlier demo. Raises `ConfigurationError` when it still runs,
    or the folder is not the demo's."""
    if not folder.exists():
        return
    known = {*OWN_FOLDERS, "log", "up.lock", DEVICES}
    strange = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    if strange:
        raise ConfigurationError(
            f"--folder {folder}: holds {strange[0]}, which no demo made; the demo empties its folder, so "
            "choose another"
        )
    with folder_lock(folder):
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "up.lock":
                entry.unlink()
