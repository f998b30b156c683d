"""YAML loader of job files: PyYAML's safe loader, with duplicate keys in a mapping as an error, and
remedies for other errors."""

from typing import Any

import yaml

from penstock.redaction import unquoted

MAX_SHOWN = 80  # characters of a key
MERGE = "tag:yaml.org,2002:merge"  # `<<: *other` may occur several times; keys beside it take precedence


class JobLoader(yaml.SafeLoader):
    """Raises `yaml.MarkedYAMLError` at the second of two equal keys; PyYAML would silently take the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        found = super().compose_mapping_node(anchor)
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
    if "another document" in text:
        return "a second document begins here; a job file holds one job: submit each from a file of its own"
    if "'\\t'" in text:
        return f"{text}; indent with blanks, not with tabs"
    if "could not find expected ':'" in text or "mapping values are not allowed" in text:
        return f"{text}; quote texts that hold a colon"
    return text
