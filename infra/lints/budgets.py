"""Lint of the size of the product: `python -m infra.lints.budgets [--write]`.

The table `[tool.penstock.budgets]` of `pyproject.toml` has a row per room: how many lines, files, public
names and named constants a room may have. A room is a folder of `libs/penstock`, of its room `scheduling`, or
of the services; `penstock_papers` is one, and so are the files that stand beside rooms. A room without a row
is refused. The last row bounds their sum.

Bounds without a table hold for the product and for `infra`: `MAX_FILES` in a folder, `MAX_LINES` in a file,
`MAX_FUNCTION_LINES` in a function. They have no exceptions.

`--write` sets every row to what its room has now, rounded up by at most 2 %.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = "pyproject.toml"
HEADER = "[tool.penstock.budgets]"
PRODUCT = ("libs/penstock", "libs/penstock_papers", "services/penstock_services")
OF_ROOMS = ("libs/penstock", "libs/penstock/scheduling", "services/penstock_services")
"""Folders whose sub-folders are rooms."""
WITHIN = ("services/penstock_services/node_reporter/kubernetes",)
"""Rooms inside of another room."""
BOUNDED = (*PRODUCT, "infra")
WHOLE = "the product"
"""Row of the sum of all rooms."""
MAX_FILES, MAX_LINES, MAX_FUNCTION_LINES = 12, 500, 70
"""Of a folder, without `__init__.py`; of a file; of a function, with its head and docstring."""
NAME = re.compile(r"_?[A-Z][A-Z0-9_]*")


class Size(NamedTuple):
    """What a room has, or may have."""

    lines: int = 0
    files: int = 0
    """Without `__init__.py`."""
    names: int = 0
    """Public classes, functions and values of its modules."""
    constants: int = 0
    """Numbers with a name, private ones too (`constants_in`)."""

    def plus(self, other: "Size") -> "Size":
        return Size(*(mine + its for mine, its in zip(self, other, strict=True)))


class Constant(NamedTuple):
    """A number, or a tuple of numbers, that a module gives a name."""

    name: str
    line: int
    statement: int
    """Index in the module's body."""


def constants_in(module: ast.Module) -> Iterator[Constant]:
    """Every named number of a module: a literal, a tuple or an expression of such."""
    for place, statement in enumerate(module.body):
        match statement:
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                if _is_number(value):
                    for each in targets:
                        if isinstance(each, ast.Name) and NAME.fullmatch(each.id):
                            yield Constant(each.id, statement.lineno, place)


def _is_number(value: ast.expr) -> bool:
    match value:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return bool(NAME.fullmatch(name))
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
        case (
            ast.Tuple(elts=[_, *_] as parts)
            | ast.Call(func=ast.Name(id="round" | "float" | "int"), args=parts)
        ):
            return all(map(_is_number, parts))
        case ast.Call(func=ast.Attribute(value=ast.Name(id="math")), args=parts):
            return all(map(_is_number, parts))
    return False


def public_names(module: ast.Module) -> set[str]:
    """What a module defines at its top level without an underscore."""
    found = set[str]()
    for statement in module.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Assign(targets=targets):
                found.update(
                    each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return {name for name in found if not name.startswith("_")}


class Source:
    """One Python file. `path`: relative to the root, with slashes."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        self.lines = text.count("\n")

    @cached_property
    def module(self) -> ast.Module:
        """Parsed when it is first asked for. Raises `SyntaxError`."""
        return ast.parse(self.text)

    @property
    def is_counted(self) -> bool:
        """Whether it counts as a file of its folder."""
        return not self.path.endswith("/__init__.py")

    def size(self) -> Size:
        return Size(
            self.lines,
            self.is_counted,
            len(public_names(self.module)),
            sum(1 for _ in constants_in(self.module)),
        )


def sources(root: Path, folders: Sequence[str] = BOUNDED) -> list[Source]:
    """Every Python file below these folders, sorted."""
    paths = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [Source(path.relative_to(root).as_posix(), path.read_text()) for path in paths]


def long_functions(module: ast.Module) -> Iterator[tuple[int, str, int]]:
    """(line, name, number of lines) of each function that is too long, methods and inner functions too."""
    todo: list[ast.AST] = [module]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if isinstance(child, ast.stmt) and (child.end_lineno or 0) - child.lineno >= MAX_FUNCTION_LINES:
                todo.append(child)
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield child.lineno, child.name, (child.end_lineno or 0) - child.lineno + 1


def room_of(path: str) -> str:
    """The room of a product file, paths relative to the root: `libs/penstock/scheduling/order/fair.py` is in
    `libs/penstock/scheduling/order`."""
    folder = path.rpartition("/")[0]
    for inner in WITHIN:
        if folder == inner or folder.startswith(f"{inner}/"):
            return inner
    for outer in sorted(OF_ROOMS, key=len, reverse=True):
        if folder == outer:
            return outer
        if folder.startswith(f"{outer}/"):
            return f"{outer}/{folder.removeprefix(f'{outer}/').partition('/')[0]}"
    return next(room for room in PRODUCT if folder == room or folder.startswith(f"{room}/"))


def rooms(files: Iterable[Source]) -> dict[str, Size]:
    """Room → what is in it today, and in the whole; a folder with `__init__.py` alone is no room."""
    found: dict[str, Size] = {}
    for file in files:
        if file.path.startswith(tuple(f"{folder}/" for folder in PRODUCT)):
            room = room_of(file.path)
            found[room] = found.get(room, Size()).plus(file.size())
    sizes = {room: found[room] for room in sorted(found) if found[room].files}
    return {**sizes, WHOLE: reduce(Size.plus, sizes.values(), Size())}


def budgets(root: Path) -> dict[str, Size]:
    """Room → what may be in it, from the table."""
    table = tomllib.loads((root / TABLE).read_text())["tool"]["penstock"]["budgets"]
    return {room: Size(*row) for room, row in table.items()}


def above(today: Mapping[str, Size], allowed: Mapping[str, Size]) -> Iterator[str]:
    """A line of text for each room above its budget, without one, or without files."""
    for room, size in today.items():
        if room not in allowed:
            yield f"{room}: a new room; give it a row in [tool.penstock.budgets] of {TABLE}"
            continue
        for what, have, may in zip(Size._fields, size, allowed[room], strict=True):
            if have > may:
                yield (
                    f"{room}: {have:,} {what}, {may:,} at most: delete as many, or raise the row of {TABLE} "
                    "and "
                    "name in a decision record what was deleted for it"
                )
    yield from (
        f"{room}: its row in {TABLE} has no room; delete it" for room in allowed.keys() - today.keys()
    )


def overfull(files: Iterable[Source]) -> Iterator[str]:
    """A line of text for each folder, file and function above its bound."""
    folders: dict[str, int] = {}
    for file in files:
        folder = file.path.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + file.is_counted
        if file.lines > MAX_LINES:
            yield f"{file.path}: {file.lines} lines, {MAX_LINES} at most"
        for line, function, lines in long_functions(file.module):
            yield f"{file.path}:{line}: {function} has {lines} lines, {MAX_FUNCTION_LINES} at most"
    for folder, count in folders.items():
        if count > MAX_FILES:
            yield f"{folder}: {count} files, {MAX_FILES} at most: name sub-folders"


def table_of(today: Mapping[str, Size], allowed: Mapping[str, Size]) -> str:
    """What every room has and may have, for the end of the CI run."""
    lines = [f"{'room':44}" + "".join(f"{what + ' (at most)':>20}" for what in Size._fields)]
    for room, size in today.items():
        shown = zip(size, allowed.get(room, Size()), strict=True)
        lines.append(f"{room:44}" + "".join(f"{f'{have:,} ({may:,})':>20}" for have, may in shown))
    return "\n".join(lines)


def rounded(count: int) -> int:
    """Up by at most 2 %, to one, two or five units of a power of ten."""
    step = 1
    for unit in (unit * 10**power for power in range(6) for unit in (1, 2, 5)):
        if unit <= count / 50:
            step = unit
    return -(-count // step) * step


def written(page: str, today: Mapping[str, Size]) -> str:
    """The text of `pyproject.toml` with rows as of today; the comment below the table's header stays."""
    before, _, rest = page.partition(f"{HEADER}\n")
    comment = re.match(r"(?:#.*\n)*", rest)
    old = re.match(r'(?:#.*\n|".*\n)*', rest)
    assert comment
    assert old
    rows = "".join(
        f'"{room}" = [{", ".join(f"{rounded(count):_}" for count in size)}]\n' for room, size in today.items()
    )
    return f"{before}{HEADER}\n{comment[0]}{rows}{rest[old.end() :]}"


def main(arguments: Sequence[str]) -> int:
    """Prints rooms with their budgets, and what is above; 1 where anything is."""
    files = sources(ROOT)
    today = rooms(files)
    if list(arguments) == ["--write"]:
        page = ROOT / TABLE
        page.write_text(written(page.read_text(), today))
    allowed = budgets(ROOT)
    print(table_of(today, allowed))
    found = [*above(today, allowed), *overfull(files)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
