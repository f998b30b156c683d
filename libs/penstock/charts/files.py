"""Files of a report, the options `--report FILE.html` and `--png DIR`: checked before the work,
written after it."""

import os
from pathlib import Path

from rich.console import Console

from penstock.charts.report import Page
from penstock.exits import BadCommand

MAX_PAGE_BYTES = 15_000_000  # a page that a browser opens at once, and a mail server lets through


def check(page: Path | None, png: Path | None) -> None:
    """Raises `BadCommand` for a file that could not be written later; makes the folder of the PNG files."""
    if page is not None:
        if page.is_dir():
            raise BadCommand(f"--report {page}: is a folder; name a file")
        if not page.parent.is_dir():
            raise BadCommand(f"--report {page}: there is no folder {page.parent}; make it first")
        if not os.access(page if page.exists() else page.parent, os.W_OK):
            raise BadCommand(f"--report {page}: cannot be written; name a file of yours")
    if png is not None:
        try:
            png.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadCommand(f"--png {png}: {error.strerror}; name a folder") from error
        if not os.access(png, os.W_OK):
            raise BadCommand(f"--png {png}: cannot be written; name a folder of yours")


def write(found: Page, page: Path | None, png: Path | None, errors: Console) -> None:
    """Writes the files that were asked for and lists them on `errors`.
    Raises `BadCommand` where the disk refuses."""
    if page is None and png is None:
        return
    from penstock.charts.render import html, save_all  # Altair takes 0.3 s

    try:
        if page is not None:
            text = html(found)
            assert len(text) <= MAX_PAGE_BYTES, f"{len(text)} bytes of page: its charts are not bounded"
            page.write_text(text, encoding="utf-8")
            errors.print(f"wrote {page}", markup=False)
        if png is not None:
            saved = save_all(found.sections, png)
            errors.print(f"wrote {len(saved)} pictures to {png}", markup=False)
    except OSError as error:
        raise BadCommand(f"{error.filename or page or png}: {error.strerror}") from error
