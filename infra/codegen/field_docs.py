"""Descriptions of a model's fields: the docstring written under each of them.

Pydantic can collect these while a class is made, but then every service would read its own source at each
start. The tools that write schemas and docs read them here instead.
"""

import ast
import inspect
import sys
from functools import cache

from penstock.model.nouns.types import Value


def field_docs(model: type[Value]) -> dict[str, str]:
    """Field → its docstring on one line, inherited ones included; fields without one are left out."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if kind.__module__.startswith("penstock."):
            found |= _module_docs(kind.__module__).get(kind.__name__, {})
    return {name: text for name, text in found.items() if name in model.__struct_fields__}


@cache
def _module_docs(module_name: str) -> dict[str, dict[str, str]]:
    """Class → field → docstring, for one module that has been imported."""
    tree = ast.parse(inspect.getsource(sys.modules[module_name]))
    return {node.name: _class_docs(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _class_docs(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, after in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found
