"""What `penstock up` refuses before it starts anything."""

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import environment
from tests.support.cli.command_process import PENSTOCK


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("PENSTOCK_PROFILE", "srft", "srtf"),
        ("PENSTOCK_BACKFILL_WINDOW", "many", "PENSTOCK_BACKFILL_WINDOW"),
        ("PENSTOCK_TOKENS", "/nowhere", "/nowhere"),
    ],
)
def test_a_wrong_setting_is_found_before_anything_starts(
    place: Path, variable: str, text: str, words: str
) -> None:
    """A typo in the profile: Postgres was made and started first, ten seconds on a busy machine."""
    home = place / "home"
    done = subprocess.run(
        [*PENSTOCK, "up", "--folder", str(place / "state"), "--port", "0"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(home, **{variable: text}),
        cwd=home,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"penstock: {variable}: "), done.stderr
    assert words in done.stderr
    assert not (place / "state" / "postgres").exists()


def test_a_folder_belongs_to_one_log(place: Path) -> None:
    """Read models of one ledger shown beside another would lie."""
    (place / "state").mkdir()
    (place / "state" / "log").write_text("the embedded log\n")
    answer = subprocess.run(
        [
            *PENSTOCK,
            "up",
            "--folder",
            str(place / "state"),
            "--log",
            "kafka://me:secret@127.0.0.1:9",
            "--port",
            "0",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment(place / "home"),
    )
    assert answer.returncode == 2
    assert "belongs to the embedded log" in answer.stderr
    assert "secret" not in answer.stderr
