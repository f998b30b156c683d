"""Redacted outline of a record: the names, kinds and lengths of its values, without the texts and numbers
themselves. Pure."""

import json
import re
from typing import Any

SHOWN_HEADERS = frozenset(
    {f"ce_{name}" for name in ("specversion", "id", "source", "type", "subject", "time")}
    | {"content-type", "traceparent", "causationid", "correlationid"}
)
MAX_OUTLINE_CHARS = 16_384
MAX_NAME_CHARS = 64
MAX_ENTRIES = 64  # of one list or object
MAX_DEPTH = 16
IDENTIFIERS = frozenset(
    {"job_id", "node_id", "task_id", "proposal_id", "token", "incarnation", "rank", "probe"}
)
"""Fields with values that are shown: they identify the job, task or node of a record."""
PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}\Z")


def outline(value: bytes) -> str:
    """Outline of a record's value, as JSON:
    `{"job_id": "ci-1", "spec": {"env": {"PASSWORD": "<text of 12>"}}}`."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return "not JSON"
    return json.dumps(_outline(found, 0))[:MAX_OUTLINE_CHARS]


def outline_of_header(name: str, text: str) -> str:
    """Attributes of an event unchanged; of other headers, which may hold credentials, only the length."""
    return text if name in SHOWN_HEADERS else f"<text of {len(text)}>"


def _outline(found: Any, depth: int, name: str = "") -> Any:
    if depth > MAX_DEPTH:
        return "…"
    if isinstance(found, dict):
        shown = list(found.items())[:MAX_ENTRIES]
        return {key[:MAX_NAME_CHARS]: _outline(inner, depth + 1, key) for key, inner in shown}
    if isinstance(found, list):
        return [_outline(inner, depth + 1) for inner in found[:MAX_ENTRIES]]
    if found is None or isinstance(found, bool):
        return found
    if isinstance(found, str):
        return found if name in IDENTIFIERS and PLAIN.match(found) else f"<text of {len(found)}>"
    return found if name in IDENTIFIERS and isinstance(found, int) else "<number>"
