"""Failed attempts as evidence against nodes and GPUs, and the distrust that follows: its reason and its
probes (decision 135)."""

from typing import Literal

from penstock.model.nouns.types import Value

TRUST_TIMER: Literal["trust"] = "trust"
"""Of a node: its pause is over, or its probe has run for long enough."""
Kind = tuple[str, str]
"""(owner, program)."""


class Failure(Value, frozen=True):
    """An attempt that failed by its own exit soon after its start."""

    kind: Kind
    node_id: str
    gpu_mask: int
    """Slots of its GPUs on this node; 0: it had none."""
    at_ms: int
    elsewhere: bool = False
    """Whether a job of its kind has run on another node since: then the job is not at fault."""
    node_works: bool = False
    """Whether a job has run on other GPUs of the node since: then only its GPUs are in doubt."""


class Distrust(Value, frozen=True):
    """Why nothing new is placed on a node or on some of its GPUs, and until when."""

    reason: str
    at_ms: int
    gpu_mask: int
    """Slots of the distrusted GPUs; 0: the whole node."""
    kinds: tuple[Kind, ...]
    """Kinds of jobs whose failures count against it."""
    failed_gpu_mask: int
    """Slots of all GPUs on which they failed; 0: they had none."""
    pause_ms: int
    until_ms: int
    """End of the pause, in ledger time."""
    open: bool = False
    """Whether it takes a probe."""
    probe: str = ""
    """The job that is its probe now; empty: none."""

    def cleared_by(self, gpu_mask: int) -> bool:
        """Whether a job that ran on these GPUs of the node proves that it can be used."""
        if self.gpu_mask:
            return bool(self.gpu_mask & gpu_mask)
        return bool(gpu_mask) or not self.failed_gpu_mask
