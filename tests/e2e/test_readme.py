"""The root README's commands, run as they stand there."""

import json
import re
import shlex
import subprocess
from pathlib import Path

from tests.e2e.conftest import PENSTOCK, ROOT, Installation

STARTS_SOMETHING_ELSE = ("make ", "export ")  # `make demo` and `make up` have tests of their own


def commands() -> list[str]:
    """Every line that a reader types, continuation lines joined, comments cut off."""
    text = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```console\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    typed = [line[2:] for line in blocks.splitlines() if line.startswith("$ ")]
    return [line for line in typed if not line.startswith(STARTS_SOMETHING_ELSE)]


def test_every_command_of_the_readme_does_what_it_says(up: Installation, place: Path) -> None:
    """A newcomer types the first page line by line; each works, in that order."""
    outputs: list[str] = []
    typed = commands()
    for command in typed:
        words = shlex.split(command, comments=True)
        if words[0] == "curl":
            words[1:1] = ["-H", f"Authorization: Bearer {up.token_file.read_text().strip()}"]
            words = [word.replace("http://127.0.0.1:8742", up.url) for word in words]
        else:
            assert words[0] == "penstock", command
            words[0:1] = PENSTOCK
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=place if "--report" in words else ROOT,
            env={**up.env, "PENSTOCK_SERVER": up.url},
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs.append(done.stdout)
    output = "\n".join(outputs)
    assert "succeeded" in outputs[0], "the first job is followed to its end"
    assert "digits-gang" in output
    assert "as of record 12" in output, "the question about the past"
    assert "ok: true" in output, "replay found no difference"
    [posted] = [number for number, line in enumerate(typed) if line.startswith("curl ")]
    assert json.loads(outputs[posted])["job_id"], "the answer to the pipeline"
    assert "nightly" in outputs[posted + 1], "its job succeeded: `wait` ends with its fate"
    assert outputs[posted + 2] == "42\n"
    assert "srtf" in outputs[-1], "two policies compared"
    assert (place / "policies.html").stat().st_size > 1_000_000, "the page is whole"
