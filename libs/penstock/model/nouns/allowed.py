"""Node constraints of a job as a value: the GPU models and the nodes that it allows."""

from collections.abc import Collection
from typing import NamedTuple


class Allowed(NamedTuple):
    """Restriction of a job to GPU models and nodes; empty parts restrict nothing."""

    gpu_models: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    image: bool = False
    """Whether it can run as an image, so that nodes which run images alone are allowed, too."""

    def allows(self, terms: Collection[str]) -> bool:
        """Whether a node with these terms (`NodeSpec.terms`) may be used, whatever its GPUs."""
        if self.only and not any(holds(one, terms) for one in self.only):
            return False
        return not any(holds(one, terms) for one in self.exclude)


def holds(term: str, terms: Collection[str]) -> bool:
    """Whether a term of a job (`penstock.model.nouns.types.NodeTerm`) holds for a node with these."""
    return all(part in terms for part in term.split("&"))


Where = tuple[()] | Allowed
"""The nodes that a job allows; the empty tuple: all, as for most jobs."""


def models_of(where: Where) -> tuple[str, ...]:
    """The GPU models that a job allows; empty: any."""
    return where.gpu_models if where else ()
