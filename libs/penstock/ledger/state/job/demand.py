"""Resource demand of a gang, as a value: equal demands compare equal."""

from collections.abc import Callable
from operator import attrgetter

import msgspec

from penstock.model.nouns.allowed import Where
from penstock.model.nouns.types import ResourceVector

NOTHING = ResourceVector()
DemandKey = tuple[object, ...]
"""Equal for interchangeable demands."""

vector_key: Callable[[ResourceVector], tuple[float, ...]] = attrgetter(
    "gpus", "cores", "host_memory_mib", "gpu_memory_mib", "bandwidth_mbps", "gpu_share_milli"
)
"""The vector as a plain tuple.
Not a function in Python: a pass over the waiting jobs asks for that of each."""


class Demand(msgspec.Struct, frozen=True):
    """A gang's shape: jobs with equal demands are interchangeable for placement."""

    workers: int
    worker: ResourceVector
    parameter_servers: int = 0
    parameter_server: ResourceVector = NOTHING
    where: Where = ()

    @property
    def tasks(self) -> int:
        return self.workers + self.parameter_servers

    def needs(self) -> tuple[ResourceVector, ...]:
        """Per task, in rank order."""
        return (self.worker,) * self.workers + (self.parameter_server,) * self.parameter_servers

    @property
    def key(self) -> DemandKey:
        """Equal for interchangeable demands, whatever number types their vectors were decoded into."""
        return (
            self.workers,
            *vector_key(self.worker),
            self.parameter_servers,
            *(vector_key(self.parameter_server) if self.parameter_servers else ()),
            *self.where,
        )
