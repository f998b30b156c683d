"""Programs built from Go modules whose go.mod and go.sum are pinned in `infra/`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from infra.devservers.build_cache import INFRA, Part, build_environment, copy_files, obtain
from infra.devservers.processes import LaunchError, run_to_end

BUILD_TIMEOUT_S = 3600.0


def pinned(folder: str, module: str) -> str:
    """Version of a module in `infra/<folder>/go.mod`, such as `v1.76.0`. Raises `LaunchError` when absent."""
    go_mod = INFRA / folder / "go.mod"
    found = re.search(rf"^.*\b{re.escape(module)} (v\d+\.\d+\.\d+)", go_mod.read_text(), re.MULTILINE)
    if found is None:
        raise LaunchError(f"{go_mod} names no version of {module}")
    return found[1]


def obtain_program(
    name: str, version: str, package: str, *, expected: str, override: str, folder: str | None = None
) -> Path:
    """The program built from `package` with the files of `infra/<folder>`, by default `infra/<name>`. Raises
    `LaunchError` with the remedy."""
    part = _part(name, version, [package], INFRA / (folder or name), expected, override, output=name)
    found = obtain(part)
    return found / name if found.is_dir() else found


def obtain_programs(
    name: str,
    version: str,
    packages: Sequence[str],
    *,
    expected: str,
    override: str,
    folder: str,
    stamps: Mapping[str, str],
) -> Path:
    """Folder of the programs built from `packages` in one build, each named as Go names it.

    `folder`: below `infra/`; with Go files, it is a module of its own, whose program is the package `.`.
    `stamps`: variable of a package → its text in the programs. Raises `LaunchError` with the remedy.
    """
    return obtain(_part(name, version, packages, INFRA / folder, expected, override, stamps=stamps))


def _part(
    name: str,
    version: str,
    packages: Sequence[str],
    source: Path,
    expected: str,
    override: str,
    *,
    output: str = "",
    stamps: Mapping[str, str] | None = None,
) -> Part:
    """`output`: file name of the one program; "": Go's own names."""
    pins = (source / "go.mod", source / "go.sum", *sorted(source.glob("*.go")))
    flags = " ".join(["-s -w", *(f"-X {variable}={text}" for variable, text in (stamps or {}).items())])

    def build(folder: Path) -> None:
        copy_files(pins, folder)
        # The caller's own workspace or vendoring must not leak into this build.
        env = build_environment(CGO_ENABLED="0", GOWORK="off", GOFLAGS="-buildvcs=false -mod=readonly")
        argv = ["go", "-C", str(folder), "build", "-trimpath", f"-ldflags={flags}"]
        argv += ["-o", f"{folder}/{output}", *packages]
        run_to_end("go build", argv, log_path=folder / "build.log", timeout_s=BUILD_TIMEOUT_S, env=env)

    return Part(name, version, pins, (("go", _remedy(pins[0])),), expected, override, build)


def _remedy(go_mod: Path) -> str:
    found = re.search(r"^go (\d+\.\d+)", go_mod.read_text(), re.MULTILINE)
    return f"Install Go {found[1] if found else '1.24'} or newer"
