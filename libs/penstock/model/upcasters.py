"""From old versions to new: `(type, version)` → a pure function on the JSON object, one step each.

A published version lives for ever. When a meaning changes, raise `VERSION` on the model, add the step
here (`v1_to_v2`), keep the frozen example in `schemas/`: a test replays the example of every version.
"""

from collections.abc import Callable, Mapping
from typing import Any

Upcaster = Callable[[dict[str, Any]], dict[str, Any]]

UPCASTERS: Mapping[tuple[str, int], Upcaster] = {}
