"""Form of the ids that the gateway gives to jobs:
`k` and 24 digits from an idempotency key, `j` and 21 otherwise."""

import re

DIGIT = "[0-9a-hjkmnp-tv-z]"  # of Crockford's alphabet
GENERATED = re.compile(rf"(k{DIGIT}{{24}}|j{DIGIT}{{21}})\Z")
IN_TEXT = re.compile(rf"\b(?:k{DIGIT}{{24}}|j{DIGIT}{{21}})(?![0-9a-z])")
STARTS_LIKE_AN_ID = re.compile(rf"[kj]{DIGIT}{{11,}}\Z")
"""An id, or the start of one as tables show it; some names have this form, too."""


def is_generated(text: str) -> bool:
    """Whether the text has the form of a whole id. A client that chose it could take the job id of another
    tenant's key, and a job of that name would hide the job of that id."""
    return GENERATED.match(text) is not None
