"""The problems that the reader of traces finds in a file."""

from pathlib import Path

import pytest

from penstock.runtime.csv_import import BadFile
from penstock.simulator.traces.importing import read_trace


def problems(path: Path, content: str | bytes) -> list[str]:
    """Writes the file; all that is wrong with it, in the reader's words and order."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(BadFile) as caught:
        read_trace(path)
    return [str(problem) for problem in caught.value.problems]
