"""Options `--report` and `--png`: their files are checked before anything runs and written at the end."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.charts.report import Page
from penstock.exits import BadCommand
from penstock.simulator.commands.options import Given
from penstock.simulator.comparison import Standing
from penstock.simulator.report.build import Background, report_of
from penstock.simulator.runs import Result
from penstock.simulator.traces.importing import Trace

MAX_PAGE_BYTES = 15_000_000  # a page that a browser opens at once, and a mail server lets through


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where to write charts."""

    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page with figures and charts, whole in one file."),
    ] = None
    png: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the charts of the page there as PNG files.")
    ] = None

    @property
    def wanted(self) -> bool:
        return self.report is not None or self.png is not None


def judge_report(asked: ReportOptions) -> None:
    """Raises `BadCommand` for what could not be written in the end; makes the folder of the pictures."""
    if asked.report is not None:
        folder = asked.report.parent
        if asked.report.is_dir() or not folder.is_dir():
            why = "is a folder; name a file" if asked.report.is_dir() else f"there is no folder {folder}"
            raise BadCommand(f"--report {asked.report}: {why}")
        if not os.access(asked.report if asked.report.exists() else folder, os.W_OK):
            raise BadCommand(f"--report {asked.report}: cannot be written")
    if asked.png is not None:
        try:
            asked.png.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadCommand(f"--png {asked.png}: {error.strerror}") from error
        if not os.access(asked.png, os.W_OK):
            raise BadCommand(f"--png {asked.png}: cannot be written")


def background(line: str, given: Given, trace: Trace, more: Sequence[tuple[str, str]] = ()) -> Background:
    asked, nodes = given.asked, given.nodes
    gpus = sum(len(node.gpus) for node in nodes)
    name = asked.cluster or (given.generator.cluster if given.generator is not None else "")
    cluster = f"{len(nodes):,} node{'s' if len(nodes) > 1 else ''}, {gpus:,} GPUs" + (
        f" ({name})" if name else ""
    )
    jobs = f"{asked.trace}: {len(trace.jobs):,} jobs, format {trace.format}"
    if trace.skipped:
        jobs += f"; {trace.skipped_lines} bad lines left out"
    return Background(
        command=line,
        title=f"{asked.trace}, {gpus:,} GPUs",
        trace=jobs,
        cluster=cluster,
        truth="none: no job ends" if given.fills(trace) else given.job_model,
        more=more,
    )


def write(
    asked: ReportOptions,
    about: Background,
    standings: Sequence[Standing],
    results: Sequence[Result],
    warning: str,
    errors: Console,
) -> None:
    """Raises `BadCommand` where the disk refuses."""
    write_report(asked, report_of(about, standings, results, warning), errors)


def write_report(asked: ReportOptions, report: Page, errors: Console) -> None:
    """Raises `BadCommand` where the disk refuses."""
    try:
        if not asked.wanted:
            return
        from penstock.charts.render import html, save_all  # Altair takes 0.3 s

        if asked.report is not None:
            text = html(report)
            assert len(text) <= MAX_PAGE_BYTES, f"{len(text)} bytes of page: its charts are not bounded"
            asked.report.write_text(text, encoding="utf-8")
            errors.print(f"wrote {asked.report}", markup=False)
        if asked.png is not None:
            saved = save_all(report.sections, asked.png)
            errors.print(f"wrote {len(saved)} pictures to {asked.png}", markup=False)
    except OSError as error:
        raise BadCommand(f"{error.filename}: {error.strerror}") from error
