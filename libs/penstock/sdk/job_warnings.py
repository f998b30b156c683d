"""Warnings about probable mistakes in a job that is accepted: texts that look like secrets, memory too small for a training."""

from collections.abc import Iterator
from typing import NamedTuple

from penstock.model.types import JobSpec
from penstock.sdk.command_words import slips
from penstock.sdk.secrets import remedy, suspicions

SMALL_MIB = 64  # no training fits into less; a user who writes 8 may mean 8 GiB

SET_BY_PENSTOCK = frozenset(["CUDA_VISIBLE_DEVICES", "PENSTOCK_JOB_ID", "PENSTOCK_TASK_ID", "PENSTOCK_NODE_ID", "PENSTOCK_ATTEMPT", "PENSTOCK_TOKEN", "PENSTOCK_ROLE", "PENSTOCK_GPUS", "PENSTOCK_CORES"])  # fmt: skip
"""Variables that each task has from its node, whatever the job sets (`node_reporter.core.environment`)."""


class Doubt(NamedTuple):
    """One warning. `field`: a path such as `resources.host_memory_mib`."""

    field: str
    message: str
    remedy: str


def warnings_of(spec: JobSpec) -> Iterator[Doubt]:
    """All warnings about a job, in no particular order."""
    for field, why in suspicions(spec.env, spec.argv, spec.secrets):
        yield Doubt(field, f"looks like a secret: {why}", remedy(field))
    for name in sorted(SET_BY_PENSTOCK & spec.env.keys()):
        text = "has no effect: Penstock sets this variable in each task"
        yield Doubt(f"env.{name}", text, "leave it out, or set it in a script (`command: |`)")
    for slip in slips(spec.argv):
        yield Doubt("command", slip.message, slip.remedy)
    for field in ("host_memory_mib", "gpu_memory_mib"):
        asked_mib = getattr(spec.resources, field)
        if asked_mib is not None and asked_mib < SMALL_MIB:
            message = f"is {asked_mib} MiB: a number without a unit counts MiB"
            yield Doubt(f"resources.{field}", message, f"write {asked_mib}GiB if that is meant")
