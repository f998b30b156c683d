"""What rests on fsync must wait for it."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("arguments", "answer"), [(["--healthy"], "ran"), ([], "refrained")])
def test_no_order_is_acted_on_before_its_token_is_on_the_disk(
    tmp_path: Path, arguments: list[str], answer: str
) -> None:
    """A node's disk begins to fail. A token that is lost with the next power cut would let a zombie's order
    start a second process on the same GPU: so without a sync nothing starts (LAW 4)."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.faults.processes.broken_disk", str(tmp_path), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.split()[-1:] == [answer], found.stderr[-2_000:]
