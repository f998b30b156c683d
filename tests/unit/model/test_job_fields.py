"""A field of a job is defined once: job file, schema, flags, tables and wire follow from that place."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields

from infra.codegen.docs import BLOCKS
from infra.codegen.job_schema import job_schema
from penstock.cli.output import Format
from penstock.cli.submission import dry_run
from penstock.client import Client
from penstock.client.submission import job_of
from penstock.model.jobs.job_fields import JobField, job_fields
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Value
from penstock.sdk.job_file.jobfile import parse_job
from tests.support.cli.command_line import penstock

LIBS = Path(__file__).resolve().parents[3] / "libs"
SET_BY_PENSTOCK = {"long_command", "retry_of", "parents"}
ALL = job_fields(JobSpec)
PARTS = [field for field in ALL if isinstance(field.kind, type) and issubclass(field.kind, Value)]
PLAIN = [field for field in ALL if field not in PARTS]
IN_FILES = [field for field in PLAIN if field.about.help]
BY_FLAG = [field for field in PLAIN if field.about.flag is not None]
RANGE = {"workers": {"min": 2, "max": 8}, "global_batch_size": 512}
"""What a job with a range of workers has."""


def names(found: list[JobField]) -> list[str]:
    return [f"{field.section}.{field.name}" for field in found]


def another_value(field: JobField) -> Any:
    """A value in a job file that is not the default."""
    if field.key == "sync":
        return f"sha256:{'0' * 64}"
    if field.kind is bool:
        return not field.default
    if field.unit == "_ms":
        return "7s"
    return 2 if field.about.example is None else field.about.example


def written(field: JobField, value: Any) -> dict[str, Any]:
    """A job file with this field alone; a range of workers has its batch."""
    if field.key == "min_workers":
        return RANGE
    return {field.section: {field.key: value}} if field.section else {field.key: value}


def in_job(field: JobField, spec: JobSpec) -> Any:
    section = next((part.name for part in PARTS if part.key == field.section), None)
    return getattr(spec if section is None else getattr(spec, section), field.name)


def test_every_field_of_a_job_is_known_to_users_or_set_by_penstock() -> None:
    """A field without a `Key` could be given by no job file and no flag: it was forgotten."""
    assert {field.name for field in fields(JobSpec)} - {field.name for field in ALL} == SET_BY_PENSTOCK
    for part in PARTS:
        known = {field.name for field in PLAIN if field.section == part.key}
        assert {field.name for field in fields(part.kind)} == known


@pytest.mark.parametrize("field", IN_FILES, ids=names(IN_FILES))
def test_a_field_of_the_job_file_reaches_the_job(field: JobField) -> None:
    """Written in a file or given to the client, it must not get lost on the way, and the editor knows it."""
    file = {"command": ["train"], "workdir": None, **written(field, another_value(field))}
    spec = parse_job(file)
    assert in_job(field, spec) != field.default
    assert job_of(file, {"owner": spec.owner}) == spec
    schema = job_schema()
    section = next((part.kind.__name__ for part in PARTS if part.key == field.section), None)
    titles = {"ResourceRequest": "Resources", "RetryPolicy": "Retry", "NodeChoice": "Nodes"}
    found = schema if section is None else schema["$defs"][titles.get(section, "Programs")]
    assert found["properties"][field.key]["description"] == field.about.help


@pytest.mark.parametrize("field", BY_FLAG, ids=names(BY_FLAG))
def test_a_flag_gives_the_same_job_as_the_key_in_a_file(
    field: JobField, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """People try with flags what they write into a file afterwards."""
    jobs: list[JobSpec] = []

    def show(connect: Callable[[], Client], spec: JobSpec, output: Format) -> None:
        jobs.append(spec)

    monkeypatch.setattr(dry_run, "show", show)
    value = another_value(field)
    file = {"owner": "ada", "workdir": None, **written(field, value), "command": ["train"]}
    words = [word for text in texts(value) for word in (field.option, text)]
    if isinstance(value, bool):
        words = [field.option if value else f"--no-{field.option.removeprefix('--')}"]
    if field.key == "min_workers":
        words = ["--min-workers", "2", "--workers", "8", "--global-batch-size", "512"]
    owner = [] if field.key == "owner" else ["--owner", "ada"]
    assert penstock("submit", "--dry-run", *owner, *words, "--", "train") == 0, capsys.readouterr().err
    [job] = jobs
    assert in_job(field, job) == in_job(field, parse_job(file)) != field.default


def texts(value: Any) -> list[str]:
    """The words after a flag, once for each time that it is given."""
    if isinstance(value, dict):
        return [f"{name}={text}" for name, text in value.items()]
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def test_the_table_of_the_docs_has_every_field_with_a_meaning() -> None:
    """People search it for a word, not for the code."""
    rows = BLOCKS["job-file"]()
    for field in IN_FILES:
        if field.section in ("", "resources", "retry"):
            prefix = f"{field.section}." if field.section else ""
            assert f"| `{prefix}{field.key}` | {field.about.help.replace('|', chr(92) + '|')} |" in rows


ADDED = """    rehearsals: Annotated[int, Meta(ge=0, le=9), Key("Runs before the first.", 3)] = 0
"""
ASK = """
import json, sys
from penstock.cli.app import run
from penstock.cli.submission import dry_run
from penstock.model.wire.codec import as_written
from infra.codegen.job_schema import job_schema
from penstock.sdk.job_file.jobfile import BadJob, parse_job

def refused():
    try:
        parse_job({"command": ["x"], "rehearsals": 10})
    except BadJob as error:
        return str(error)

def show(connect, spec, output):
    flag.append(spec.rehearsals)

flag, dry_run.show = [], show
run(["submit", "--rehearsals", "4", "--dry-run", "--", "x"])
sys.stdout = sys.stderr
run(["submit", "--help"])
sys.stdout = sys.__stdout__
print(json.dumps({
    "file": as_written(parse_job({"command": ["x"], "rehearsals": 3}))["rehearsals"],
    "omitted": "rehearsals" not in as_written(parse_job({"command": ["x"]})),
    "refused": refused(), "flag": flag, "schema": job_schema()["properties"]["rehearsals"],
}))
"""


def test_one_line_adds_a_field(tmp_path: Path) -> None:
    """A developer adds a field in one place; file, bounds, messages, schema, flag, help and wire have it."""
    shutil.copytree(LIBS, tmp_path / "libs", ignore=shutil.ignore_patterns("__pycache__"))
    definition = tmp_path / "libs/penstock/model/jobs/job_spec.py"
    before = definition.read_text()
    last = "    parents: Annotated["
    assert before.count(last) == 1
    definition.write_text(before.replace(last, ADDED + last))
    done = subprocess.run(
        [sys.executable, "-P", "-c", ASK],
        env={"PYTHONPATH": f"{tmp_path / 'libs'}:{LIBS.parent}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "file": 3,
        "omitted": True,
        "refused": "rehearsals: 10 is out of range; give at most 9",
        "flag": [4],
        "schema": {
            "default": 0,
            "description": "Runs before the first.",
            "examples": [3],
            "maximum": 9,
            "minimum": 0,
            "title": "Rehearsals",
            "type": "integer",
        },
    }
    assert "--rehearsals <int>              Runs before the first." in done.stderr
