"""Names of other schedulers' options and keys, and what Penstock has in place of each: for unknown flags
and unknown keys of job files."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from penstock.model.jobs.job_fields import job_fields
from penstock.model.jobs.job_spec import JobSpec

_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "run_timeout": "time timeout time_limit walltime max_duration active_deadline_seconds idle_duration",
        "name": "job_name title",
        "workers": "ntasks nodes num_nodes num_workers replicas parallelism nproc_per_node nnodes slots",
        "resources.gpus": "gres gpu num_gpus gpus_per_node gpus_per_task ngpus slots_per_trial nvidia_gpu",
        "resources.cores": "cpus_per_task cpus cpu num_cpus ncpus cpus_per_gpu",
        "resources.host_memory": "mem memory mem_per_cpu mem_per_gpu mem_per_node ram",
        "resources.gpu_memory": "gpu_mem vram gpu_ram",
        "gpu_models": "constraint gpu_type accelerators accelerator gpu_name gputype",
        "workdir": "chdir working_dir cwd workspace",
        "env": "export envs environment_variables env_vars environ env_file variables",
        "environment.container": "image image_id docker_image docker container_image singularity",
        "environment.venv": "virtualenv python_env",
        "environment.conda": "conda_env conda_environment",
        "retry.max_attempts": "retries max_restarts backoff_limit max_retries restart_policy",
        "priority": "nice priority_class priority_class_name",
        "labels": "comment tags annotations wckey metadata",
        "command": "run commands wrap cmd entrypoint args exec setup",
        "owner": "user uid account",
        "sync": "upload code source file_mounts src",
        "preemptible": "requeue no_requeue use_spot spot",
        "grace": "grace_period termination_grace_period_seconds grace_time kill_timeout",
        "interactive": "interactive pty tty stdin it ti",
        "nodes.only": "nodelist node_list node_selector node_name affinity",
        "nodes.exclude": "exclude exclude_nodes exclude_hosts",
        "queue_timeout": "max_wait pending_timeout queue_time",
    }
)
"""Our field by its path in a job file → names of other systems, in lower case with `_`."""
_NONE: Mapping[str, str] = MappingProxyType(
    {
        "partition queue pool resource_pool cloud region zone": "leave it out: a cell has one queue; `nodes` "
        "in a job file, or --only-node, chooses nodes, `gpu_models` GPUs",
        "output error stdout stderr log_file open_mode": "`penstock logs JOB` has a job's output",
        "array sweep matrix": "submit each task of an array as a job of its own: for seed in 0 1 2; do "
        "penstock submit …; done",
        "dependency depends_on needs": "wait for the earlier job before: penstock wait JOB && penstock "
        "submit …",
        "mail_type mail_user notify": "follow events: penstock events --follow",
        "exclusive oversubscribe overcommit": "whole GPUs are exclusive by default; `resources.gpu_share` "
        "asks for less",
        "begin start_time": "start the submission then, or hold the job: penstock hold JOB",
        "signal": "each stop sends SIGTERM; `grace` is the time until SIGKILL",
        "reservation licenses gres_flags hint distribution ntasks_per_node cpu_bind": "leave it out: "
        "Penstock chooses nodes, GPUs and cores",
        "volume volumes mount bind v rm shm_size network ipc privileged": "containers see the job's folder "
        "and GPUs without it: leave it out",
        "ports port": "jobs have no ports; `penstock exec JOB -- COMMAND` runs beside one",
    }
)
"""Names of other systems → what to do without an equivalent."""
FIELDS: Mapping[str, str] = {name: field for field, names in _FIELDS.items() for name in names.split()}
NONE: Mapping[str, str] = {name: remedy for names, remedy in _NONE.items() for name in names.split()}
"""The same by each name."""

SHORT: Mapping[str, str] = MappingProxyType(
    {
        "A": "account",
        "C": "constraint",
        "D": "chdir",
        "G": "gpus",
        "J": "job_name",
        "N": "nodes",
        "a": "array",
        "c": "cpus_per_task",
        "m": "mem",
        "n": "ntasks",
        "p": "partition",
        "t": "time",
        "v": "volume",
        "w": "nodelist",
        "x": "exclude",
        "i": "interactive",
        "b": "begin",
    }
)
"""One letter of sbatch's or docker's → its long name."""


class Equivalent(NamedTuple):
    """What Penstock has in place of another system's name."""

    field: str
    """Path in a job file; empty: nothing."""
    text: str
    """What to do where there is nothing."""


def equivalent(name: str) -> Equivalent | None:
    """In place of an option (`--gpus-per-node`, `-t`) or key (`numNodes`)
    of another system; None: not known."""
    bare = name.lstrip("-")
    if len(bare) == 1:
        bare = SHORT.get(bare, bare)
    plain = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in bare).strip("_")
    plain = plain.replace("-", "_").replace(".", "_")
    for known in (plain, plain.replace("_", "")):
        if known in NONE:
            return Equivalent("", NONE[known])
        if known in FIELDS or known == "gpus":
            return Equivalent(FIELDS.get(known, "resources.gpus"), "")
    return None


def flag(name: str) -> str:
    """The remedy for an option that `penstock submit` does not have; empty: none is known."""
    found = equivalent(name)
    if found is None:
        return ""
    if not found.field:
        return found.text
    section, _, key = found.field.rpartition(".")
    fields = (each for each in job_fields(JobSpec) if (each.section, each.key) == (section, key))
    ours = next((each.option for each in fields if each.about.flag is not None), "")
    return f"use {ours}" if ours else "give program and arguments after --"


def key(name: str, place: str = "") -> str:
    """The remedy for a key that a job file does not have in this section; empty: none is known."""
    found = equivalent(name)
    if found is None:
        return ""
    if found.field == "command":
        return "write `command: |` and the lines that a shell shall run, or `command: [program, argument]`"
    if found.field:
        section, _, field = found.field.rpartition(".")
        if section and section == place:
            return f"did you mean `{field}`?"
        return f"write `{section}: {{{field}: …}}`" if section else f"write `{field}`"
    return found.text
