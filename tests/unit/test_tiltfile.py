"""The Tiltfile, run with Tilt's builtins replaced by ones that only take what Tilt takes."""

import os
from pathlib import Path
from typing import Any

import starlark

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tilt"
LOCAL_RESOURCE = {
    "name", "cmd", "deps", "dir", "serve_cmd", "serve_dir", "resource_deps", "auto_init", "trigger_mode", "labels",
    "links", "readiness_probe",
}  # fmt: skip
PRELUDE = """
def _abspath(path):
    return abspath(path)
os = struct(path=struct(abspath=_abspath))
"""


def run_tiltfile(text: str) -> list[dict[str, Any]]:
    """The resources that a Tiltfile declares. Raises for unknown names, keywords or syntax."""
    resources: list[dict[str, Any]] = []

    def local_resource(name: str, **given: Any) -> None:
        given["name"] = name
        unknown = set(given) - LOCAL_RESOURCE
        if unknown:
            raise TypeError(f"local_resource takes no {sorted(unknown)}")
        resources.append(given)

    module = starlark.Module()
    module["TRIGGER_MODE_MANUAL"] = "manual"
    module.add_callable("local_resource", local_resource)
    module.add_callable("abspath", lambda path: os.path.abspath(FOLDER / path))
    module.add_callable(
        "probe", lambda *, period_secs, http_get: {"period_secs": period_secs, "http_get": http_get}
    )
    module.add_callable("http_get_action", lambda *, port, path: {"port": port, "path": path})
    dialect = starlark.Dialect.extended()
    dialect.enable_top_level_stmt = True
    environment = starlark.Globals.extended_by([starlark.LibraryExtension.StructType])
    starlark.eval(module, starlark.parse("Tiltfile", PRELUDE + text, dialect), environment)
    return resources


def test_every_resource_starts_something_that_exists() -> None:
    """A make target or job file was renamed: `tilt up` would show a red resource on the next developer's machine."""
    resources = {resource["name"]: resource for resource in run_tiltfile((FOLDER / "Tiltfile").read_text())}
    targets = {line.split(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    for resource in resources.values():
        command = resource.get("cmd") or resource.get("serve_cmd")
        words = command.split()
        assert words[0] in ("make", ".venv/bin/penstock"), command
        if words[0] == "make":
            assert words[1] in targets, command
        if "-f" in words:
            assert (ROOT / words[words.index("-f") + 1]).is_file(), command
        assert set(resource.get("resource_deps", [])) <= set(resources)
    assert {"penstock", "kafka", "jaeger"} <= set(resources)


def test_every_sample_job_can_be_submitted_from_tilt() -> None:
    names = {resource["name"] for resource in run_tiltfile((FOLDER / "Tiltfile").read_text())}
    assert {file.stem for file in (FOLDER / "jobs").glob("*.yaml")} <= names
