"""Rows that are short of what they have to reach, and why: expected failures of `python -m tests.papers`, which ends with 1 where another row is short, or one of these is not."""

from collections.abc import Mapping, Sequence

KNOWN: Mapping[str, Sequence[str]] = {}
"""Why → rows, as `table: label`."""
