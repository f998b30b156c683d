"""`penstock …` as a pipeline runs it: without a terminal, a gateway or settings of the environment.

In this process: the start of another one takes most of a command's processor time. Where the process is the
point (its signals, its pipe, its end), a test starts `PENSTOCK`.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from io import BytesIO, TextIOWrapper
from pathlib import Path
from unittest.mock import patch

from penstock.cli import app

ROOT = Path(__file__).resolve().parents[3]
PENSTOCK = (sys.executable, "-c", "from penstock.cli.main import main; main()")


def in_process(
    arguments: Sequence[str], env: Mapping[str, str], stdin: str = "", folder: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """`penstock …` in this folder, with this environment and nothing else in it."""
    printed, complained = BytesIO(), BytesIO()
    out, err = (
        TextIOWrapper(bytes_, encoding="utf-8", write_through=True) for bytes_ in (printed, complained)
    )
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, env, clear=True))
        stack.enter_context(chdir(folder))
        stack.enter_context(patch.object(sys, "stdin", TextIOWrapper(BytesIO(stdin.encode()), "utf-8")))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        code = app.run(arguments)
    return subprocess.CompletedProcess(
        arguments, code, printed.getvalue().decode(), complained.getvalue().decode()
    )


def run(*arguments: str, stdin: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    """The command as a pipeline would run it: no terminal, nobody at the gateway's port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return in_process(arguments, {**clean, "PENSTOCK_SERVER": "http://127.0.0.1:9", **env}, stdin)
