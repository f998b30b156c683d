"""The Tiltfile, run with Tilt's builtins replaced by ones that only take what Tilt takes."""

import os
from pathlib import Path
from typing import Any

import starlark

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "tilt"
LOCAL_RESOURCE = {
    "name",
    "cmd",
    "deps",
    "dir",
    "serve_cmd",
    "serve_dir",
    "serve_env",
    "resource_deps",
    "auto_init",
    "trigger_mode",
    "labels",
    "links",
    "readiness_probe",
}
PRELUDE = """
def _abspath(path):
    return abspath(path)
os = struct(path=struct(abspath=_abspath))
"""
SERVICE = ".venv/bin/python -m penstock_services."
ROLES = ".penstock/roles"
"""Where `make roles` puts the URLs."""


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


def tilts_resources() -> dict[str, dict[str, Any]]:
    """By name."""
    return {resource["name"]: resource for resource in run_tiltfile((FOLDER / "Tiltfile").read_text())}


def service_environments(folder: Path) -> dict[str, dict[str, str]]:
    """Resource → what Tilt adds to the environment of this service, a process of its own; `folder` stands for
    that of `make roles`."""
    return {
        name: {variable: text.replace(ROLES, str(folder)) for variable, text in resource["serve_env"].items()}
        for name, resource in tilts_resources().items()
        if resource.get("serve_cmd", "").startswith(SERVICE)
    }
