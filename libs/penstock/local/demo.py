"""`penstock demo`: a fresh installation, a dozen and a half real training jobs, a live table, a summary.

The demo is a user like any other: it submits, watches and asks why through the gateway.
"""

import os
import shutil
import time
from pathlib import Path

from penstock.errors import ConfigurationError
from penstock.local.demo_drive import DemoFailed, drive
from penstock.local.demo_guard import GuardPart, Machine
from penstock.local.demo_jobs import DEVICES, ENOUGH, checkout, demo_jobs, guard_jobs, turn_jobs
from penstock.local.demo_screen import Show, print_summary, save_picture
from penstock.local.lock import folder_lock
from penstock.local.options import DemoOptions
from penstock.local.services import guard_of
from penstock.local.stack import OWN_FOLDERS, running
from penstock.runtime.race import first_of
from penstock.screen import console as make_console

LIMIT_S = 600.0  # something hangs: it takes a minute, and some on a machine that has much else to do
UNSCHEDULABLE_GRACE_MS = 3_000  # the default, 5 minutes, leaves time for a node to join
WITHOUT = '["cores"]'  # a search for a training's cores takes half a minute, and with other cores its speed has to settle anew
ACCESS = ("PENSTOCK_TOKENS", "PENSTOCK_GATEWAY_TLS_CERT", "PENSTOCK_GATEWAY_TLS_KEY")
"""Settings of another gateway in this shell: the demo's own is for the user who runs it."""


async def demo(options: DemoOptions) -> int:
    """0 when every job ended as expected, else 1."""
    folder, machine_cores = checkout(options.jobs), len(os.sched_getaffinity(0))
    jobs = turn_jobs(folder, options.folder) if options.turns else demo_jobs(folder)
    if options.turns:
        options = options.of_turns()
        os.environ.setdefault("PENSTOCK_PROFILE", "interleave")
    else:
        options = options.of_jobs_that_meet(machine_cores)
        os.environ.setdefault("PENSTOCK_WITHOUT", WITHOUT)
    start_fresh(options.folder)
    console = make_console()
    for name in ACCESS:
        os.environ.pop(name, None)
    os.environ.setdefault("PENSTOCK_UNSCHEDULABLE_GRACE_MS", str(UNSCHEDULABLE_GRACE_MS))
    began_s = time.perf_counter()
    console.print(
        f"[bold]Penstock demo[/]: {len(jobs)} training jobs on {options.gpus_in_words}", markup=True
    )
    if not options.turns:
        console.print(
            "then one that a job without GPUs slows, until the contention-guard takes cores from that job"
        )
    console.print(f"[dim]everything is stored in {options.folder}[/]\n", soft_wrap=True)
    async with running(options, console) as stack:
        console.print()
        show = Show(console, len(jobs))
        part = None if options.turns else _guard_part(options, folder, machine_cores, show)
        if not await first_of(drive(stack.url, jobs, part, show), stack.until_failure(), timeout_s=LIMIT_S):
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


def _guard_part(options: DemoOptions, folder: Path, machine_cores: int, show: Show) -> GuardPart:
    """What the contention-guard does, for which the demo's profile and the machine are looked at."""
    training, other = guard_jobs(folder, options.folder, options.cores - 1)
    (options.folder / DEVICES).mkdir()
    machine = Machine(machine_cores, *guard_of(os.environ))
    return GuardPart(training, other, machine, (options.folder / DEVICES / ENOUGH).touch, show.say)


def start_fresh(folder: Path) -> None:
    """Removes an earlier demo. Raises `ConfigurationError` when it still runs, or the folder is not the demo's."""
    if not folder.exists():
        return
    known = {*OWN_FOLDERS, "log", "up.lock", DEVICES}
    strange = sorted(entry.name for entry in folder.iterdir() if entry.name not in known)
    if strange:
        raise ConfigurationError(
            f"--folder {folder}: holds {strange[0]}, which no demo made; the demo empties its folder, so choose another"
        )
    with folder_lock(folder):
        for entry in folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "up.lock":
                entry.unlink()
