"""Warnings about probable mistakes in a job that is accepted: texts that look like secrets, memory too small
for a training."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from penstock.model.jobs.job_spec import JobSpec
from penstock.sdk.job_file.command_words import slips
from penstock.sdk.job_file.secrets import remedy, suspicions

SMALL_MIB = 64  # no training fits into less; a user who writes 8 may mean 8 GiB

_OWN = (
    "JOB_ID TASK_ID NODE_ID ATTEMPT TOKEN ROLE GPUS GPU_SHARE CORES HOST_MEMORY_MIB GPU_MEMORY_MIB "
    "GPU_MEMORY_LIMIT_MIB"
)
SET_BY_PENSTOCK = frozenset(
    ["CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", *(f"PENSTOCK_{name}" for name in _OWN.split())]
)
"""Variables that each task has from its node, whatever the job sets (`node_reporter.core.environment`)."""
SET_IN_GANGS = frozenset(["RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK"])
"""The same, of several workers; the only task of a job has no ranks."""
NAME_OF_A_SHELL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|BASH_FUNC_.*")


class Doubt(NamedTuple):
    """One warning. `field`: a path such as `resources.host_memory_mib`."""

    field: str
    message: str
    remedy: str


def warnings_of(spec: JobSpec) -> Iterator[Doubt]:
    """All warnings about a job, in no particular order."""
    for field, why in suspicions(spec.env, spec.argv, spec.secrets):
        yield Doubt(field, f"looks like a secret: {why}", remedy(field))
    gang = spec.workers + spec.parameter_servers > 1 or spec.global_batch_size is not None
    for name in sorted((SET_BY_PENSTOCK | (SET_IN_GANGS if gang else frozenset())) & spec.env.keys()):
        text = "has no effect: Penstock sets this variable in each task"
        yield Doubt(f"env.{name}", text, "leave it out, or set it in a script (`command: |`)")
    for name in spec.env:
        if NAME_OF_A_SHELL.fullmatch(name) is None:
            text = "shells read no variable of such a name, and some drop it"
            yield Doubt(f"env.{name}", text, "use letters, digits and _, and begin with no digit")
    for slip in slips(spec.argv):
        yield Doubt("command", slip.message, slip.remedy)
    for field in ("host_memory_mib", "gpu_memory_mib"):
        asked_mib = getattr(spec.resources, field)
        if asked_mib is not None and asked_mib < SMALL_MIB:
            message = f"is {asked_mib} MiB: a number without a unit counts MiB"
            yield Doubt(f"resources.{field}", message, f"write {asked_mib}GiB if that is meant")
