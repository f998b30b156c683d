"""YAML loader of job files: PyYAML's safe loader, with duplicate keys in a mapping as an error, numbers as
they are seen, and remedies for other errors."""

import re
from typing import Any

import yaml

from penstock.text.redaction import unquoted

MAX_SHOWN = 80  # characters of a key
SECOND = "a second document begins here; a job file holds one job: submit each from a file of its own"
MERGE = "tag:yaml.org,2002:merge"  # `<<: *other` may occur several times; keys beside it take precedence


NUMBERS = {
    "tag:yaml.org,2002:int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)"),
    "tag:yaml.org,2002:float": re.compile(
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
"""Numbers of YAML 1.1 without those that are other ones than people see: `0755` (octal), `1:30` (base 60),
`1_000` and `0xff` are texts."""


class JobLoader(yaml.SafeLoader):
    """Raises `yaml.MarkedYAMLError` at the second of two equal keys, of which PyYAML would silently take the
    last one, and at an alias within its own anchor."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as PyYAML declares it
        first: [
            (tag, re.compile(rf"(?:{NUMBERS[tag].pattern})\Z") if tag in NUMBERS else expression)
            for tag, expression in resolvers
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._open: list[str | None] = []
        """Anchors of the nodes that are being read."""

    def get_single_node(self) -> Any:
        """The one document that holds something; empty ones beside it (a `---` at the end) are no jobs."""
        self.get_event()  # type: ignore[no-untyped-call]  # the stream's begin
        found = None
        while not self.check_event(yaml.StreamEndEvent):
            begin: Any = self.peek_event()  # type: ignore[no-untyped-call]
            document = self.compose_document()
            if isinstance(document, yaml.ScalarNode) and not document.value and document.style is None:
                continue
            if found is not None:
                raise yaml.MarkedYAMLError(problem=SECOND, problem_mark=begin.start_mark)
            found = document
        return found

    def compose_node(self, parent: Any, index: Any) -> Any:
        alias: Any = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's
        if self.check_event(yaml.AliasEvent) and alias.anchor in self._open:
            text = f"the alias *{alias.anchor[:MAX_SHOWN]} stands within its own anchor; write its value"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=alias.start_mark)
        return super().compose_node(parent, index)

    def compose_sequence_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        found = super().compose_sequence_node(anchor)
        self._open.pop()
        return found

    def compose_mapping_node(self, anchor: Any) -> Any:
        self._open.append(anchor)
        found = super().compose_mapping_node(anchor)
        self._open.pop()
        marks: dict[tuple[str, str], yaml.Mark] = {}
        for key, _ in found.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            if (first := marks.get((key.tag, key.value))) is not None:
                text = f"`{key.value[:MAX_SHOWN]}` stands twice, first in line {first.line + 1}; remove one"
                raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
            marks[key.tag, key.value] = key.start_mark
        return found


def problem_of(error: yaml.MarkedYAMLError) -> str:
    """The problem and, where one is known, the remedy, without quotations from the text."""
    text = unquoted(error.problem or "it cannot be read")
    if "'\\t'" in text:
        return f"{text}; indent with blanks, not with tabs"
    if "could not find expected ':'" in text or "mapping values are not allowed" in text:
        return f"{text}; quote texts that hold a colon"
    return text
