"""Clocks, sleeps and time-outs in tests, which need a reason: `python -m infra.lints.clocks [FILE …]`.

A test that waits for a time instead of an event fails without a fault on a busy machine (`tests/README.md`).
Hence these are refused in `tests/`, but for its bench, which measures:

- a sleep, but for `sleep(0)`, which lets others run
- a wall or monotonic clock
- a time-out: `wait_for`, `asyncio.timeout`, `timeout=5`, `wait(5)`, `join(5)`, `pytest.mark.timeout`

An exception is a comment in the same statement, `# clock: REASON`, or for a whole file `# clocks: REASON`.
The reason says why no verdict depends on the machine's speed.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("tests/bench",)
CLOCKS = frozenset({"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"})
TIMEOUTS = frozenset({"wait_for", "timeout", "timeout_at"})
NAMES = frozenset({"timeout", "timeout_s", "timeout_ms", "patience_s", "within_s", "deadline_s"})
REASON = re.compile(r"#.*\bclock: \S+ \S+ \S+")
WHOLE_FILE = re.compile(r"^# clocks: \S+ \S+ \S+", re.MULTILINE)


def found(source: str) -> Iterator[tuple[int, str]]:
    """(line, what stands there) of each violation in a test's source. Raises `SyntaxError`."""
    if WHOLE_FILE.search(source):
        return
    lines = source.splitlines()
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.stmt):
            parts = list(_own_parts(statement))
            last = statement.end_lineno or statement.lineno
            if hasattr(statement, "body"):  # its head alone
                last = max((part.end_lineno or 0 for part in parts), default=statement.lineno)
            if not any(REASON.search(line) for line in lines[statement.lineno - 1 : last]):
                yield from ((part.lineno, what) for part in parts if (what := _violation(part)))


def _own_parts(statement: ast.stmt) -> Iterator[ast.expr]:
    """All expressions of a statement, without those of the statements in its body."""
    todo: list[ast.AST] = [statement]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                todo.append(child)
                if isinstance(child, ast.expr):
                    yield child


def _violation(part: ast.expr) -> str:
    """What is wrong with an expression; "" where nothing is."""
    match part:
        case ast.Attribute(value=ast.Name(id="time" as module), attr=name) if name in CLOCKS:
            return f"{module}.{name}"
        case ast.Attribute(value=ast.Name(id="asyncio"), attr=name) if name in TIMEOUTS:
            return f"asyncio.{name}"
        case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr="timeout"):
            return "pytest.mark.timeout"
        case ast.Call(func=ast.Attribute(attr="sleep") as func, args=[length]) if not _is_zero(length):
            return f"{ast.unparse(func)}({ast.unparse(length)})"
        case ast.Call(
            func=ast.Attribute(attr="time", value=ast.Call(func=ast.Attribute(attr="get_running_loop")))
        ):
            return "the event loop's clock"
        case ast.Call(
            func=ast.Attribute(attr="wait" | "join" as name), args=[ast.Constant(value=int() | float())]
        ):
            return f"{name} with a time-out"
        case ast.Call(keywords=keywords):
            given = [each for each in keywords if each.arg in NAMES]
            own = [
                each
                for each in given
                if not (isinstance(each.value, ast.Constant) and each.value.value is None)
            ]
            return f"the argument {own[0].arg}" if own else ""
    return ""


def _is_zero(length: ast.expr) -> bool:
    return isinstance(length, ast.Constant) and length.value == 0


def main(arguments: Sequence[str]) -> int:
    """Prints each violation in these files, or in all tests; 1 where there is one."""
    files = [Path(name).resolve() for name in arguments] or sorted((ROOT / "tests").rglob("*.py"))
    count = 0
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        for line, what in found(file.read_text()):
            count += 1
            print(
                f"{name}:{line}: {what}: wait for an event, or say why: `# clock: REASON` (tests/README.md)"
            )
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
