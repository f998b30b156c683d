"""Lint of features that nobody needs: `python -m infra.lints.unused`.

| what | needs |
|---|---|
| an event of the registry | a maker and a reader in the product; without a maker its speaker is `NOBODY` |
| a field of `PlacerSettings`, an environment variable, an option of a service | a test that names it |
| a verb of `penstock` | a line `penstock VERB` in a page |
| a named number in deciding code | a comment or docstring with its source, measurement or bound |

A maker constructs the event, or names its `TYPE`; a reader names it elsewhere: in a table of handlers, a
`case`, an `isinstance`, an annotation of an argument, or by its type's text. The model itself, which defines,
codes and upcasts events, neither makes nor reads.
"""

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from infra.codegen.docs import documents
from infra.lints.budgets import PRODUCT, ROOT, Source, constants_in, sources
from penstock.cli.app import PANELS
from penstock.commandline import Entry
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.event import REGISTRY, Event
from penstock.model.wire.speakers import RULES, Speaker

MODEL = "libs/penstock/model/"
DECIDING = (
    *(f"libs/penstock/{room}/" for room in ("cluster", "ledger", "proposals", "scheduling", "why")),
    *(f"libs/penstock_papers/{room}/" for room in ("baselines", "coda", "muri")),
    *(f"services/penstock_services/{name}/core/" for name in ("batcher", "contention_guard", "estimator")),
    *(f"services/penstock_services/{name}/core/" for name in ("migrator", "placer")),
)
"""Folders of code that decides."""
FOR_THE_LOG: Mapping[str, str] = {
    "ModelTrained": "which model answers from this record on, for who reads the log (decision 13)",
}
"""Events that people read, and no part of the product; with what they are for."""
MAKERS = frozenset({"checked", "checked_json"})
"""Functions that construct their first argument."""
VARIABLE = re.compile(r'"(PENSTOCK_[A-Z0-9_]*[A-Z0-9])"')
SERVICES = "services/"


class Uses(NamedTuple):
    """Names of classes that the product constructs, and that it names in another way, or by their type's
    text."""

    made: set[str]
    read: set[str]


def uses(files: Iterable[Source], models: Iterable[type[Event]]) -> Uses:
    """Of these classes, outside the model."""
    found, types = Uses(set(), set()), {model.__name__: model.TYPE for model in models}
    any_name = re.compile(rf"\b({'|'.join(types)})\b")
    for file in files:
        if not file.path.startswith(MODEL):
            found.read.update(name for name, text in types.items() if f'"{text}"' in file.text)
            if any_name.search(file.text):
                _note(file.module, types.keys(), found)
    return found


def _note(module: ast.Module, kinds: Collection[str], found: Uses) -> None:
    unread = set[int]()
    for node in ast.walk(module):
        match node:
            case ast.Call(func=func, args=arguments):
                unread.add(id(func))
                if _name(func) in kinds:
                    found.made.add(_name(func))
                elif _name(func) in MAKERS and arguments:
                    found.made.add(_name(arguments[0]))
                    unread.add(id(arguments[0]))
            case (
                ast.FunctionDef(returns=ast.expr() as returns)
                | ast.AsyncFunctionDef(returns=ast.expr() as returns)
            ):
                unread.update(id(part) for part in ast.walk(returns))  # who returns an event has made one
            case ast.Attribute(attr="TYPE", value=value) if _name(value) in kinds:
                found.made.add(_name(value))
                unread.add(id(value))
            case ast.Name() | ast.Attribute() if id(node) not in unread and _name(node) in kinds:
                found.read.add(_name(node))


def _name(node: ast.expr) -> str:
    """Last part of a dotted name; "": another expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def idle_events(registry: Iterable[type[Event]], found: Uses, silent: Iterable[type[Event]]) -> Iterator[str]:
    """A line of text for each event without maker or reader. `silent`: events that nobody sends any more,
    which stay readable because they were published."""
    silent = frozenset(silent)
    for model in registry:
        if model in silent:
            continue
        if model.__name__ not in found.made:
            yield (
                f"{model.__name__}: nothing makes this event; delete it, or if it was published, let "
                "nobody say it"
            )
        if model.__name__ not in found.read | FOR_THE_LOG.keys():
            yield f"{model.__name__}: nothing reads this event; do not make it"


def variables(files: Iterable[Source]) -> set[str]:
    """Environment variables that the product names, whole."""
    return {name for file in files for name in VARIABLE.findall(file.text)}


def options(files: Iterable[Source]) -> dict[str, str]:
    """Options of services, and the argument that has each: `--like-this` in calls of `typer.Option`, else the
    argument's name."""
    found: dict[str, str] = {}
    for file in files:
        if file.path.startswith(SERVICES) and "typer" in file.text:
            for node in ast.walk(file.module):
                match node:
                    case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                        found.update((flag, name) for flag in _flags(annotation, name))
                    case ast.arg(arg=name, annotation=ast.expr() as annotation):
                        found.update((flag, name) for flag in _flags(annotation, name))
    return found


def _flags(annotation: ast.expr, name: str) -> Iterator[str]:
    """Flags of an annotation with `typer.Option(…)`, else the one that is derived from the name."""
    for call in ast.walk(annotation):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("typer.Option", "_memory"):
            given = [each.value for each in call.args if isinstance(each, ast.Constant)]
            own = [text for text in given if isinstance(text, str) and text.startswith("--")]
            yield own[0].partition("/")[0] if own else f"--{name.replace('_', '-')}"


def untested(names: Mapping[str, str], tests: str) -> Iterator[str]:
    """Those of which tests name neither the setting nor the word that stands for it in the code."""
    words = set(re.findall(r"[A-Za-z0-9_]+", tests))
    for name, inside in sorted(names.items()):
        if not words & {name, inside} and name not in tests:
            yield f"{name}: no test names this setting; test it, or delete it"


def verbs(entries: Mapping[str, Entry], before: str = "penstock") -> Iterator[str]:
    """Every command, with the groups above it."""
    for name, entry in entries.items():
        if entry.entries:
            yield from verbs(entry.entries, f"{before} {name}")
        else:
            yield f"{before} {name}"


def unsaid(commands: Iterable[str], pages: str) -> Iterator[str]:
    """Those without a line in a page."""
    pages = pages.replace("\\|", "|")  # of a table
    for command in commands:
        before, _, last = command.rpartition(" ")
        if not re.search(rf"{before} (?:[a-z-]+\|)*{last}\b", pages):
            yield f"{command}: no page has a line about this verb"


def without_source(file: Source) -> Iterator[str]:
    """Named numbers of a file beside which neither a comment nor a docstring stands."""
    lines = file.text.splitlines()
    for constant in constants_in(file.module):
        after = file.module.body[constant.statement + 1 : constant.statement + 2]
        match after:
            case [ast.Expr(value=ast.Constant(value=str()))]:
                continue
        statement = file.module.body[constant.statement]
        own = lines[statement.lineno - 1 : statement.end_lineno]
        if not any("  # " in line for line in own) and not lines[statement.lineno - 2].startswith("# "):
            yield (
                f"{file.path}:{constant.line}: {constant.name}: a number without its source, measurement "
                "or bound"
            )


def findings(root: Path) -> Iterator[str]:
    """A line of text for each thing without a use or a source."""
    files = sources(root, PRODUCT)
    silent = [model for model, rule in RULES.items() if rule.speaker is Speaker.NOBODY]
    found = uses(files, REGISTRY.values())
    yield from idle_events(REGISTRY.values(), found, silent)
    tests = "\n".join(path.read_text() for path in sorted((root / "tests").rglob("*.py")))
    fields = {name: name for name in PlacerSettings.__struct_fields__}
    named = {name: name.removeprefix("PENSTOCK_") for name in variables(files)}
    yield from untested({**fields, **named, **options(files)}, tests)
    pages = "\n".join(path.read_text() for path in documents(root))
    for entries in PANELS.values():
        yield from unsaid(verbs(entries), pages)
    for file in files:
        if file.path.startswith(DECIDING):
            yield from without_source(file)


def main() -> int:
    """Prints each finding; 1 where there is one."""
    found = list(findings(ROOT))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
