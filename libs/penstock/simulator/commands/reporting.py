"""Options `--report` and `--png`: their files are checked before anything runs and written at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.charts import files
from penstock.charts.report import Page
from penstock.simulator.assumptions import LABELS
from penstock.simulator.commands.options import Given
from penstock.simulator.report.build import Background
from penstock.simulator.traces.files.importing import Trace
from penstock.text.counting import count


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options for the files of charts."""

    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a self-contained page with figures and charts."),
    ] = None
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the charts of the page to this folder as PNG files."),
    ] = None

    @property
    def wanted(self) -> bool:
        return self.report is not None or self.png is not None

    def check_files(self) -> None:
        """Raises `BadCommand` for a file that could not be written later;
        makes the folder of the PNG files."""
        files.check(self.report, self.png)

    def write_files(self, page: Page, errors: Console) -> None:
        """Writes the files. Raises `BadCommand` where the disk refuses."""
        files.write(page, self.report, self.png, errors)


def background(
    line: str,
    given: Given,
    trace: Trace,
    assumed: Mapping[str, str],
    more: Sequence[tuple[str, str]] = (),
) -> Background:
    asked, nodes = given.asked, given.nodes
    gpus = sum(len(node.gpus) for node in nodes)
    name = asked.cluster or (given.generator.cluster if given.generator is not None else "")
    cluster = f"{count(len(nodes), 'node')}, {count(gpus, 'GPU')}" + (f" ({name})" if name else "")
    jobs = f"{asked.trace}: {len(trace.jobs):,} jobs, format {trace.format}"
    if trace.skipped:
        jobs += f"; {trace.skipped_lines} bad lines left out"
    return Background(
        command=line,
        title=f"{asked.trace}, {count(gpus, 'GPU')}",
        trace=jobs,
        cluster=cluster,
        job_model="none: no job ends" if given.fills(trace) else given.job_model,
        assumptions=[(LABELS[key], text) for key, text in assumed.items()],
        more=more,
    )
