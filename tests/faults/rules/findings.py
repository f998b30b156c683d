"""What the rules of the ledger find: violations, and placed tasks."""

from typing import Any, NamedTuple

Fact = dict[str, Any]


class Violation(Exception):
    """Something that must never happen has happened; `rule` names the rule."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule
        self.what = what


class Placed(NamedTuple):
    """What a valid record decided for one task, and the joining of its node at that time."""

    job_id: str
    place: Fact
    gpus: tuple[str, ...]
    """UUIDs."""
    boot_id: str
    incarnation: int


def kind_of(type_name: str) -> str:
    """A fact's type without its version."""
    return type_name.rpartition(".")[0]
