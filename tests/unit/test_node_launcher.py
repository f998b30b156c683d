"""Files that a shim writes whole: there complete or not at all, and nothing is left open when the disk refuses."""

import json
import os
from pathlib import Path

import pytest

from penstock_services.node_reporter.shell.output import Output
from penstock_services.node_reporter.shell.shim import write_whole


def refuse(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_refused_write_leaves_no_file_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shim tries for hours to write down an exit on a full disk; it must not run out of descriptors."""
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        for _ in range(5):
            with pytest.raises(OSError, match="No space"):
                write_whole(str(tmp_path), "exit.json", {"exit_code": 0}, durable=True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "exit.json").exists()
    write_whole(str(tmp_path), "exit.json", {"exit_code": 0}, durable=True)
    assert json.loads((tmp_path / "exit.json").read_text()) == {"exit_code": 0}


@pytest.mark.parametrize("size", [10, 100, 101, 250, 100_000])
def test_a_log_is_bounded_and_keeps_its_ends(tmp_path: Path, size: int) -> None:
    path = tmp_path / "job" / "task.log"
    output = Output(str(path), 100)
    text = bytes(ord("a") + number % 26 for number in range(size))
    for start in range(0, size, 7):
        output.write(text[start : start + 7])
    output.close()
    written = path.read_bytes()
    assert written.startswith(text[:100])
    assert written.endswith(text[-min(50, max(size - 100, 1)) :])
    assert len(written) < 100 + 65_536 + 300
    assert (size <= 100) == (written == text)
