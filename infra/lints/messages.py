"""Messages of the product: its string literals that are written for people.

A literal counts as a message if it has `MIN_WORDS` words or more: texts of errors, reasons, remedies, notes,
help and logs. Not messages: docstrings, strings of several lines (schemas, scripts, pages), and statements of
SQL. A field of an f-string is one word.
"""

import ast
import re
from collections.abc import Iterator

MIN_WORDS = 6
FIELD = "X"
_SQL = re.compile(r"\s*\(?(SELECT|INSERT|WITH|UPDATE|DELETE|CREATE|DROP|ALTER|GRANT|REVOKE|PRAGMA)\b")
_SEVERAL_LINES = re.compile(r"\n.*\S.*\n")
_WORD = re.compile(r"\S*\w\S*")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each message of a module, in order of their lines."""
    literals = sorted(_literals(ast.parse(source)), key=lambda node: (node.lineno, node.col_offset))
    for node in literals:
        text = _text(node)
        if len(_WORD.findall(text)) >= MIN_WORDS and not (_SQL.match(text) or _SEVERAL_LINES.search(text)):
            yield node.lineno, text


def _literals(tree: ast.Module) -> Iterator[ast.Constant | ast.JoinedStr]:
    """String literals but docstrings: statements of their own."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node
            waiting += [
                part.value for part in ast.iter_child_nodes(node) if isinstance(part, ast.FormattedValue)
            ]
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            waiting += ast.iter_child_nodes(node)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(str(part.value) if isinstance(part, ast.Constant) else FIELD for part in node.values)
