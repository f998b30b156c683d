"""Span contexts of a job's trace: deterministic trace and span ids, and the W3C `traceparent` header.

Every id is a hash of the job's id, or of the parent's id, name and key, never a random number: a service that
writes a span again after a crash writes the same id, and any service can compute a job's root span without
its submission. Pure; OpenTelemetry is not needed here. Source of the header: W3C Trace Context §3.2, version
00.
"""

import re
from hashlib import sha256
from typing import NamedTuple

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
MAX_TRACEPARENT_CHARS = 128  # version 00 has 55; a longer one violates the specification
SAMPLED = 0x01  # the one flag that version 00 defines


class SpanContext(NamedTuple):
    """Context of one span: 128-bit trace id, 64-bit span id (both > 0), and whether the trace is sampled."""

    trace_id: int
    span_id: int
    sampled: bool


def job_context(job_id: str, ratio: float) -> SpanContext:
    """The root span of a job's trace. `ratio` 0–1: the share of jobs that are sampled, decided by the id
    alone.

    sha256 of the job id: bytes 0–15 trace id, 16–23 root span id, 24–31 the number that is compared with
    `ratio`; so every service with the same ratio samples the same jobs, and a higher ratio only adds jobs.
    """
    digest = sha256(job_id.encode()).digest()
    return SpanContext(
        trace_id=int.from_bytes(digest[:16], "big") or 1,  # all zeros is invalid in W3C Trace Context
        span_id=int.from_bytes(digest[16:24], "big") or 1,
        sampled=int.from_bytes(digest[24:], "big") < ratio * 2.0**64,
    )


def child(parent: SpanContext, name: str, key: str) -> SpanContext:
    """The context of a child span.
    `key` distinguishes siblings of one name (attempt, event id, ledger seq)."""
    digest = sha256(f"{parent.trace_id:x}/{parent.span_id:x}/{name}/{key}".encode()).digest()
    return SpanContext(parent.trace_id, int.from_bytes(digest[:8], "big") or 1, parent.sampled)


def to_traceparent(context: SpanContext) -> str:
    """The header's text, 55 characters."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{SAMPLED if context.sampled else 0:02x}"


def from_traceparent(text: str | None) -> SpanContext | None:
    """Parses a foreign header; None when it is absent or violates the specification (then: no context).

    Later versions are read by the fields of version 00, as the specification asks.
    """
    if text is None or len(text) > MAX_TRACEPARENT_CHARS:
        return None
    found = TRACEPARENT.fullmatch(text)
    if found is None or text.startswith("ff") or (text.startswith("00") and found[4]):
        return None
    trace_id, span_id = int(found[1], 16), int(found[2], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(found[3], 16) & SAMPLED))


def well_formed(text: str | None) -> str | None:
    """A foreign header that may be passed on: itself, or None when it violates the specification."""
    return None if from_traceparent(text) is None else text
