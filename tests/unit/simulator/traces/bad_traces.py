"""What the reader of traces finds wrong in a file, and what a run of the command makes of it."""

import json
from pathlib import Path

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.files.importing import read_trace
from tests.support.cli.command_line import penstock


def problems(path: Path, content: str | bytes) -> list[str]:
    """Writes the file; all that is wrong with it, in the reader's words and order."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as caught:
        read_trace(path)
    return [str(problem) for problem in caught.value.problems]


def simulated(capfd: pytest.CaptureFixture[str], trace: Path, *options: str) -> dict[str, float]:
    """The figures of a run of the command."""
    assert penstock("simulate", str(trace), "-o", "json", *options) == 0, capfd.readouterr().err
    found: dict[str, float] = json.loads(capfd.readouterr().out)
    return found
