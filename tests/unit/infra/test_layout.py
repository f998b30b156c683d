"""The two import roots: what a type checker or an editor finds when it is given `libs` and `services` and
nothing else."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from penstock.local.services import NAMES

ROOT = Path(__file__).resolve().parents[3]
ROOTS = (ROOT / "libs", ROOT / "services")
PACKAGES = frozenset({"penstock", "penstock_papers", "penstock_services"})


def own_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every import of an own module: (module, name taken from it or "")."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module, alias.name) for alias in node.names)


@cache
def place_of(module: str) -> Path | None:
    """The file that the search paths give for a module."""
    for root in ROOTS:
        base = root.joinpath(*module.split("."))
        for found in (base / "__init__.py", base.with_suffix(".py")):
            if found.is_file():
                return found
    return None


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines or imports at its top level, also inside `if` and `try`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
    return found


def test_every_own_import_resolves_with_the_two_roots_alone() -> None:
    """An editor without the virtual environment shows each own module, and follows each name to its
    definition."""
    sources = [path for root in ROOTS for path in root.rglob("*.py")]
    assert len(sources) > 100
    unresolved = []
    for source in sources:
        for module, name in own_imports(source):
            if module.partition(".")[0] not in PACKAGES:
                continue
            place = place_of(module)
            if place is None or (
                name and place_of(f"{module}.{name}") is None and name not in names_in(place)
            ):
                unresolved.append(f"{source.relative_to(ROOT)}: {module} {name}")
    assert unresolved == []


def test_every_folder_with_code_is_a_regular_package() -> None:
    """A folder without `__init__.py` becomes a namespace package: tools skip it, and another wheel may add to
    it."""
    for root in ROOTS:
        folders = {path.parent for path in root.rglob("*.py")}
        assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_services_load_clients_only_where_one_is_used() -> None:
    """An HTTP client costs 7 MiB in each process, and file systems of an archive one more; a Kafka client
    0.15 s of each start."""
    services = [f"penstock_services.{name.replace('-', '_')}.shell.service" for name in NAMES]
    reporter = [f"penstock_services.node_reporter.shell.{name}" for name in ("run", "linux")]
    code = f"import sys, {', '.join([*services, *reporter])}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(found.stdout.split()).isdisjoint({"httpx", "fsspec", "rich", "aiokafka"})


def test_no_inventory_is_read_by_slot() -> None:
    """`spec.gpus` has the order of NVML's indexes, which move; `NodeState.gpu_model` knows slots."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for root in ROOTS
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "gpus"
        and isinstance(node.value.value, ast.Attribute)
        and node.value.value.attr == "spec"
        and not isinstance(node.slice, ast.Constant)
    ]
    assert found == []
