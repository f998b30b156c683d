"""Base class and registry of events: frozen structs with an explicit type string and an integer version.

A published version never changes (style 4): a new optional field keeps the version, a changed meaning
gets a new one with an upcaster. The registry is the only list of events.
"""

from functools import cache
from typing import ClassVar, TypeVar

from penstock.model.nouns.types import Value
from penstock.model.schema.topics import MAX_EVENT_BYTES, Topic


class Event(Value, frozen=True, gc=False):
    """Base of all events. Subclasses set `TYPE` (dotted, past tense for facts), `VERSION` ≥ 1 and `TOPIC`.

    `TOPIC` is None for facts that exist only inside ledger records.
    """

    TYPE: ClassVar[str]
    VERSION: ClassVar[int] = 1
    TOPIC: ClassVar[Topic | None] = None
    MAX_BYTES: ClassVar[int] = MAX_EVENT_BYTES
    """Maximum size of the JSON value on every topic."""

    def subject(self) -> str:
        """What the event is about (CloudEvents `subject`): the first identifier field."""
        for name in ("job_id", "task_id", "node_id", "proposal_id", "timer_id"):
            value = getattr(self, name, None)
            if isinstance(value, str):
                return value
        return self.TYPE


class UnknownFact(Event, frozen=True):
    """Stands for a fact of a later version that this one may leave out: no fold knows it, and no reader
    writes it."""

    TYPE = "penstock.unknown"


REGISTRY: dict[str, type[Event]] = {}
"""Wire type (`penstock.job.submitted.v1`) → model, current versions only; older ones are upcast."""

E = TypeVar("E", bound=type[Event])


@cache
def wire_type(model: type[Event]) -> str:
    """`TYPE` and `VERSION` as one string, as in the CloudEvents `type` attribute."""
    return f"{model.TYPE}.v{model.VERSION}"


def event(model: E) -> E:
    """Class decorator: enters the model into the registry; two models of one type are an error."""
    name = wire_type(model)
    if name in REGISTRY:
        raise TypeError(f"{name} is already taken by {REGISTRY[name].__name__}")
    REGISTRY[name] = model
    return model
