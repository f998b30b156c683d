"""`penstock …` as a subprocess: without a terminal, a gateway or settings of the environment."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PENSTOCK = (sys.executable, "-c", "from penstock.cli.main import main; main()")


def run(*arguments: str, stdin: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    """The command as a pipeline would run it: no terminal, nobody at the gateway's port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [*PENSTOCK, *arguments], input=stdin, capture_output=True, text=True, timeout=180, check=False,
        env={**clean, "PENSTOCK_SERVER": "http://127.0.0.1:9", **env}, cwd=ROOT,
    )  # fmt: skip
