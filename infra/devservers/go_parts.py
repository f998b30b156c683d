"""Programs built from Go modules whose go.mod and go.sum are pinned in `infra/`."""

import re
from pathlib import Path

from infra.devservers.build_cache import INFRA, Part, build_environment, copy_files, obtain
from infra.devservers.processes import LaunchError, run_to_end

GO_REMEDY = "Install Go 1.24 or newer"
BUILD_TIMEOUT_S = 3600.0


def pinned(folder: str, module: str) -> str:
    """Version of a module in `infra/<folder>/go.mod`, such as `v1.76.0`. Raises `LaunchError` when absent."""
    go_mod = INFRA / folder / "go.mod"
    found = re.search(rf"^\s*{re.escape(module)} (v\d+\.\d+\.\d+)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise LaunchError(f"{go_mod} names no version of {module}")
    return found[1]


def obtain_program(name: str, version: str, package: str, *, expected: str, override: str) -> Path:
    """The program built from `package` with the files of `infra/<name>`. Raises `LaunchError` with the
    remedy."""
    pins = (INFRA / name / "go.mod", INFRA / name / "go.sum")

    def build(folder: Path) -> None:
        copy_files(pins, folder)
        # The caller's own workspace or vendoring must not leak into this build.
        env = build_environment(CGO_ENABLED="0", GOWORK="off", GOFLAGS="-buildvcs=false -mod=readonly")
        argv = [
            "go",
            "-C",
            str(folder),
            "build",
            "-trimpath",
            "-ldflags=-s -w",
            "-o",
            str(folder / name),
            package,
        ]
        run_to_end("go build", argv, log_path=folder / "build.log", timeout_s=BUILD_TIMEOUT_S, env=env)

    found = obtain(Part(name, version, pins, (("go", GO_REMEDY),), expected, override, build))
    return found / name if found.is_dir() else found
