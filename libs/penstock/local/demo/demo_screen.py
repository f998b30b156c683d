"""Screen of the demo: a live table on a terminal, else a line per event; then the summary."""

import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from penstock.cli.following.follow import phases_ms, print_event
from penstock.cli.output import duration
from penstock.cli.queries.explain import in_short
from penstock.cli.queries.tables import bar, nodes_of, now_ms, status_of
from penstock.local.demo.demo_jobs import DemoJob
from penstock.screen import plain_table

PICTURE_COLUMNS = 124  # wide enough for the reasons
STAGES, PROGRESS = "penstock.stages.measured", "penstock.steps.measured"
PROGRESS_S = 5.0  # between two lines about a job's progress


class Show:
    """State of the demo while it runs. `rows` and `why`: job id → the gateway's answer."""

    def __init__(self, console: Console, expected: int) -> None:
        self.console = console
        self.expected = expected
        self.jobs: dict[str, DemoJob] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.why: dict[str, Mapping[str, Any]] = {}
        self.nodes: list[dict[str, Any]] = []
        self.ended: set[str] = set()
        self.word = ""
        """Before each line of the part: who acts in it."""
        self.lines: list[str] = []
        """What there was to see of it, or why it was left out."""
        self.wrong: list[str] = []
        """What did not come as expected in it."""
        self.others: Mapping[str, str] = {}
        """Commands for other demonstrations, and what they show."""
        self._said = ""
        self._progress_s: dict[str, float] = {}
        self.busiest: RenderableType = Text()
        """The table when most jobs ran at once, for the picture."""
        self._most = 0.0
        self._began_s = time.perf_counter()
        self._live: Live | None = None

    @contextmanager
    def screen(self) -> Iterator[None]:
        """On a terminal the table is live inside the block, and its last state stays."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, auto_refresh=False) as self._live:
            try:
                yield
            finally:
                self._live = None

    def draw(self) -> None:
        """Draws the table as it is now."""
        running = sum(row["status"] == "running" for row in self.rows.values()) + len(self.rows) / 1_000
        if running >= self._most:
            self.busiest, self._most = self._table(), running
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def say(self, text: str) -> None:
        """What the part comes to now: under the table, or a line of its own."""
        self._said = text
        if not self.console.is_terminal:
            self.console.print(
                f"{self._passed_s:6.1f} s  [bold]{self.word:<16}[/]  {escape(text)}", soft_wrap=True
            )

    def print_event(self, event: Mapping[str, Any]) -> None:
        """Without a terminal: prints a line for an event; of each job's progress one now and then."""
        if self.console.is_terminal or event["type"] == STAGES:
            return
        if event["type"] == PROGRESS:
            last_s = self._progress_s.get(event["job_id"], -PROGRESS_S)
            if self._passed_s < last_s + PROGRESS_S:
                return
            self._progress_s[event["job_id"]] = self._passed_s
        job = self.jobs.get(event["job_id"])
        name = job.spec.name if job is not None else self._name(event)
        print_event(event, f"{self._passed_s:6.1f} s  {name:<16}")

    @property
    def _passed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _name(self, event: Mapping[str, Any]) -> str:
        """The event of a submission may be here before the answer to it."""
        spec = event["data"].get("spec") or {}
        return str(spec.get("name") or event["job_id"])

    def _table(self) -> RenderableType:
        table = plain_table("JOB", "STATE", "NODES", "GPUS", "WAITED", "RAN", right=("GPUS", "WAITED", "RAN"))
        for column, width in zip(table.columns, (16, 13, 9, 4, 6, 6), strict=True):
            column.min_width = width  # a table that keeps its shape is easier to watch
        now = now_ms()
        for job_id, job in self.jobs.items():
            row = self.rows.get(job_id)
            if row is None:
                table.add_row(escape(job.spec.name), "[dim]submitted[/]", "–", "–", "–", "–")
                continue
            waited, _, ran = phases_ms(row, now)
            table.add_row(
                escape(row["name"]),
                status_of(row),
                escape(nodes_of(row)),
                str(row["gpus"] or "–"),
                duration(waited),
                duration(ran),
            )
        free = [
            f"{node['node_id']} {bar(node['gpus'] - node['gpus_free'], node['gpus'], width=node['gpus'])}"
            for node in sorted(self.nodes, key=lambda node: str(node["node_id"]))
        ]
        expected = max(self.expected, len(self.jobs))
        foot = (
            f"[dim]{len(self.ended)} of {expected} ended · {self._passed_s:.0f} s[/]   GPUs  "
            f"{'   '.join(free)}"
        )
        return Group(
            table, Text(), Text.from_markup(foot), _lines(self.word, [self._said] if self._said else [])
        )


def _lines(word: str, lines: list[str]) -> RenderableType:
    """Each with the word before it; on a narrow screen wrapped beside that."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        table.add_row(f"[bold]{word}[/]", escape(line))
    return table


def differences(show: Show) -> list[str]:
    """What did not come as expected, one line per job."""
    found = []
    for job_id, job in show.jobs.items():
        row = show.rows.get(job_id, {})
        got = (row.get("outcome"), row.get("exit_code") if job.exit_code is not None else None)
        if got != (job.outcome, job.exit_code):
            found.append(
                f"{job.spec.name}: {_outcome(*got)} instead of {_outcome(job.outcome, job.exit_code)} "
                f"({row.get('reason', '')})"
            )
        elif job.attempts > 1 and row.get("attempt") != job.attempts:
            found.append(f"{job.spec.name}: {row.get('attempt')} attempts instead of {job.attempts}")
    return found


def _outcome(outcome: str | None, exit_code: int | None) -> str:
    return f"{outcome}" + (f" with code {exit_code}" if exit_code is not None else "")


def save_picture(show: Show, took_s: float, folder: Path, target: Path) -> None:
    """The screen at its busiest and at its end, as one SVG."""
    out = Console(
        record=True, width=PICTURE_COLUMNS, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    out.print("[dim]$[/] make demo\n")
    out.print(show.busiest)
    print_summary(show, took_s, folder, out)
    picture = out.export_svg(title="penstock demo")
    target.write_text(re.sub(r"@font-face\s*{[^}]*}", "", picture))  # they would be fetched from elsewhere


ABOUT_JOBS = ("penstock why ", "penstock events ", "penstock logs ")


def print_summary(show: Show, took_s: float, folder: Path, out: Console) -> list[str]:
    """Where the time of each job went and why it went where it went; returns the differences."""
    out.print("\n[bold]Summary[/]\n")
    table = plain_table(
        "JOB",
        "ENDED",
        "QUEUE",
        "LAUNCH",
        "RUN",
        "WHERE",
        "WHY",
        right=("QUEUE", "LAUNCH", "RUN"),
        wrap=("WHY",),
    )
    for job_id in show.jobs:
        row = show.rows[job_id]
        queue, launch, run = phases_ms(row)
        table.add_row(
            escape(row["name"]),
            status_of(row),
            duration(queue),
            duration(launch),
            duration(run),
            escape(nodes_of(row)),
            escape(in_short(show.why.get(job_id, {}), row)),
        )
    out.print(table)
    if show.lines:
        out.print()
        out.print(_lines(show.word, show.lines))
    wrong = [*differences(show), *show.wrong]
    if wrong:
        out.print(f"\n[red]Not as expected[/] ({took_s:.0f} s):")
        for line in wrong:
            out.print(f"  {line}", markup=False, soft_wrap=True)
    else:
        out.print(f"\n[green]All {len(show.jobs)} jobs ended as expected[/], {took_s:.0f} s in all.")
    out.print("\nLook further: everything that happened is stored.\n", markup=False)
    installed = Path(sys.executable).parent
    lines = [
        *([] if shutil.which("penstock") else [(f"export PATH={installed}:$PATH", "where `penstock` is")]),
        (
            f"penstock up --folder {_near(folder)}",
            "start the same installation again, then in another terminal:",
        ),
        ("penstock why gpu-together", "with which jobs it took turns, and how fast that was expected to be"),
        (
            "penstock why digits-converges",
            "why it moved, the cost of its stop, and at which iteration it resumed",
        ),
        ("penstock events digits-converges", "its losses before and after the move"),
        ("penstock events augment", "when it lost cores, when it got them back, and why"),
        ("penstock why digits-gang", "the candidates and their scores"),
        ("penstock why too-big", "what would have to change"),
        ("penstock events diverges", "both attempts, step by step"),
        ("penstock logs digits-mlp", "what the training printed"),
        ("penstock replay", "decide everything again and compare"),
        *show.others.items(),
    ]
    named = {job.spec.name for job in show.jobs.values()}
    for command, meaning in lines:
        if command.startswith(ABOUT_JOBS) and command.split()[-1] not in named:
            continue
        out.print(f"  {command:<42} [dim]{meaning}[/]", soft_wrap=True)
    return wrong


def _near(folder: Path) -> Path:
    """Relative where that is shorter to read."""
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder
