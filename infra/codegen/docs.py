"""Generator of diagrams and tables in the docs from the code: `python -m infra.codegen.docs [--check]`.

In any Markdown file, what stands between `<!-- generated: NAME -->` and `<!-- end -->` is written from the
block of that name below. Everything else in the file is left alone.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from infra.codegen.asyncapi import ABOUT_TOPIC, rights, topic_key
from infra.codegen.examples import EXAMPLES
from infra.codegen.job_schema import job_schema
from infra.codegen.schemas import ROOT
from infra.devservers.kafka import acl_table
from penstock.log.topic_settings import (
    DAY_MS,
    FOR_EVER,
    JOIN,
    MAX_MESSAGE_BYTES,
    RETENTION_MS,
    suffices,
    topic_partitions,
    topic_settings,
)
from penstock.model.nouns.transitions import JOB_TRANSITIONS, NODE_TRANSITIONS, TASK_TRANSITIONS
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.topics import CELL_TOPICS, COMPACTED_TOPICS, Topic
from penstock.runtime import settings

MARKED = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
OPENING = re.compile(r"^<!-- generated: .* -->$", re.MULTILINE)
FOREIGN_FOLDERS = frozenset({"node_modules", "build", "dist"})


def mermaid(table: "MappingProxyType[Any, frozenset[Any]]") -> str:
    """The table as a Mermaid state diagram, states and arrows in a stable order."""
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(table))}"]
    for old, successors in table.items():
        lines += [f"    {old} --> {new}" for new in sorted(successors)]
        if not successors:
            lines.append(f"    {old} --> [*]")
    return "\n".join(lines)


def _diagram(table: "MappingProxyType[Any, frozenset[Any]]") -> str:
    return f"```mermaid\n{mermaid(table)}\n```"


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _carried(topic: Topic | None) -> list[type[Event]]:
    """In the order of their examples, which does not depend on the order of imports."""
    models = [REGISTRY[name] for name in EXAMPLES]
    return [model for model in models if topic == model.TOPIC]


def _topics() -> str:
    """Writers and readers as the broker enforces them."""
    writers = rights(ROOT, "write")

    def rows() -> Iterator[tuple[str, ...]]:
        for topic in Topic:
            every = writers[topic] == sorted({who for found in writers.values() for who in found})
            who = "every service" if every else ", ".join(writers[topic])
            yield f"`{topic}`", topic_key(topic), who, ABOUT_TOPIC[topic]

    return _table(("topic", "key", "may write (ACL)", "what for"), rows())


def _rights() -> str:
    """One line per identity, as infra/kafka/acls.yaml gives it."""

    def short(names: list[str]) -> str:
        return ", ".join(name.split(".")[1] for name in names)

    def rows() -> Iterator[tuple[str, ...]]:
        for who, verbs in acl_table().items():
            groups = ", ".join(f"`{prefix}*`" for prefix in verbs.get(JOIN, ()))
            yield f"`{who}`", short(verbs["write"]), short(verbs["read"]), groups

    return _table(("identity", "WRITE on topics", "READ on topics", "READ on groups"), rows())


def _topic_partitions() -> str:
    def rows() -> Iterator[tuple[str, ...]]:
        for topic, count in topic_partitions().items():
            yield (
                f"`{topic}`",
                "one per cell" if topic in CELL_TOPICS else str(count),
                topic_key(Topic(topic)),
                "the newest of each key" if topic in COMPACTED_TOPICS else _retention(RETENTION_MS[topic]),
            )

    return _table(("topic", "partitions", "keyed by", "retention"), rows())


def _retention(retention_ms: int) -> str:
    return "for ever" if retention_ms == FOR_EVER else f"{retention_ms // DAY_MS} days"


def _topic_settings() -> str:
    """Settings that each topic is created with and must have, with three copies and with one."""
    three, one = topic_settings(Topic.LEDGER, 3), topic_settings(Topic.LEDGER, 1)

    def rows() -> Iterator[tuple[str, ...]]:
        for name, value in three.items():
            wanted = (
                f"`{value}`"
                if one[name] == value
                else f"`{value}` (with fewer than three copies `{one[name]}`)"
            )
            if name == "retention.ms":
                wanted = "as above"
            more = name == "retention.ms" or suffices(name, str(10 * MAX_MESSAGE_BYTES), value)
            yield f"`{name}`", wanted, "more" if more else ""

    return _table(("setting", "value", "also accepted"), rows())


def _events() -> str:
    """A list per topic of its events, in the order of the source; then those inside of ledger records."""
    parts = []
    for topic in (*Topic, None):
        if models := _carried(topic):
            lines = [
                f"- `{wire_type(model).removeprefix('penstock.')}`: {_first_sentence(model)}"
                for model in models
            ]
            parts.append("\n".join([f"### {topic or 'Inside ledger records'}", *lines]))
    return "\n\n".join(parts)


def _first_sentence(model: type[Event]) -> str:
    """Of the model's docstring, on one line and without its condition; empty for a model without."""
    paragraph = " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) |; ", paragraph, maxsplit=1)[0]
    return f"{sentence.rstrip('.')}." if sentence else ""


def _settings() -> str:
    """The table in the docstring of penstock.runtime.settings, maintained beside the code that reads the
    settings."""
    lines = (settings.__doc__ or "").splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def _job_file() -> str:
    """Every field that a job file may have."""
    schema = job_schema()
    parts = [("", schema), ("resources.", schema["$defs"]["Resources"]), ("retry.", schema["$defs"]["Retry"])]

    def rows() -> Iterator[tuple[str, ...]]:
        for prefix, part in parts:
            for name, entry in part["properties"].items():
                if "$ref" in entry or name == "script":
                    continue  # its own rows follow
                default = entry.get("default")
                given = "" if default in (None, [], {}) else f"`{default}`"
                if name == "command":
                    given = "required"
                example = f"`{entry['examples'][0]}`" if "examples" in entry else ""
                yield f"`{prefix}{name}`", str(entry.get("description", "")), given, example

    return _table(("field", "meaning", "default", "example"), rows())


BLOCKS: Mapping[str, Callable[[], str]] = {
    "states-job": lambda: _diagram(JOB_TRANSITIONS),
    "states-task": lambda: _diagram(TASK_TRANSITIONS),
    "states-node": lambda: _diagram(NODE_TRANSITIONS),
    "topics": _topics,
    "rights": _rights,
    "topic-partitions": _topic_partitions,
    "topic-settings": _topic_settings,
    "events": _events,
    "settings": _settings,
    "job-file": _job_file,
}
"""Name → the text between the marks."""


class UnknownBlock(Exception):
    """A document asks for a block that does not exist, or does not end one."""


def regenerate(text: str, where: str) -> str:
    """The document with every marked block written anew. Raises `UnknownBlock`."""

    def written(match: re.Match[str]) -> str:
        if match["name"] not in BLOCKS:
            known = ", ".join(BLOCKS)
            raise UnknownBlock(f"{where}: there is no block {match['name']!r}; use one of {known}")
        return f"{match[1]}{BLOCKS[match['name']]()}\n{match[4]}"

    if len(OPENING.findall(text)) != len(MARKED.findall(text)):
        raise UnknownBlock(f"{where}: a generated block does not end; close it with `<!-- end -->`")
    return MARKED.sub(written, text)


def documents(root: Path) -> list[Path]:
    """Every Markdown file of the repository, without hidden and foreign folders."""
    found = []
    for path in sorted(root.rglob("*.md")):
        parts = path.relative_to(root).parts
        if not any(part.startswith(".") or part in FOREIGN_FOLDERS for part in parts):
            found.append(path)
    return found


def stale(root: Path) -> dict[Path, str]:
    """Document → the text that it should have, for those that have another. Raises `UnknownBlock`."""
    found = {}
    for path in documents(root):
        before = path.read_text()
        after = regenerate(before, str(path.relative_to(root)))
        if after != before:
            found[path] = after
    return found


def main(arguments: list[str]) -> int:
    """0: all is well or was written; 1: stale with `--check`, or an unknown block; 2: usage."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m infra.codegen.docs [--check]", file=sys.stderr)
        return 2
    try:
        found = stale(ROOT)
    except UnknownBlock as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in found.items():
        where = path.relative_to(ROOT)
        if arguments:
            print(f"{where}: a generated block differs from the code; run `make docs`", file=sys.stderr)
        else:
            path.write_text(text)
            print(f"{where}: written")
    return 1 if found and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
