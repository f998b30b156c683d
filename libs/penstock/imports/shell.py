"""Scripts of other schedulers: their variables in Penstock's terms, and what is not there."""

import re
from collections.abc import Mapping
from types import MappingProxyType

from penstock.imports.keys import Note, Notes

GPUS = "$(echo $CUDA_VISIBLE_DEVICES | tr , '\\n' | grep -c .)"  # number of GPUs of the task
JOB_NUMBER = "$(printf %s \"$PENSTOCK_JOB_ID\" | cksum | cut -d' ' -f1)"
"""A number of ten digits at most: scripts compute ports from it."""
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "SLURM_PROCID": "${RANK:-0}",
        "SLURM_NTASKS": "${WORLD_SIZE:-1}",
        "SLURM_NPROCS": "${WORLD_SIZE:-1}",
        "SLURM_LOCALID": "${LOCAL_RANK:-0}",
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_ARRAY_JOB_ID"), JOB_NUMBER),
        "SLURM_JOB_NAME": "$PENSTOCK_JOB_ID",
        "SLURM_RESTART_COUNT": "$((PENSTOCK_ATTEMPT - 1))",
        "SLURM_CPUS_PER_TASK": "$OMP_NUM_THREADS",
        "SLURM_CPUS_ON_NODE": "$OMP_NUM_THREADS",
        "SLURM_JOB_NODELIST": "${MASTER_ADDR:-127.0.0.1}",
        "SLURM_NODELIST": "${MASTER_ADDR:-127.0.0.1}",
        "SLURM_JOB_NUM_NODES": "${WORLD_SIZE:-1}",
        "SLURM_NNODES": "${WORLD_SIZE:-1}",
        "SLURM_NODEID": "${RANK:-0}",
        "SLURM_SUBMIT_DIR": "$PWD",
        "SLURM_TMPDIR": "${TMPDIR:-/tmp}",
        "SLURM_GPUS_ON_NODE": GPUS,
        "SKYPILOT_NUM_NODES": "${WORLD_SIZE:-1}",
        "SKYPILOT_NODE_RANK": "${RANK:-0}",
        "SKYPILOT_NODE_IPS": "${MASTER_ADDR:-127.0.0.1}",
        "SKYPILOT_NUM_GPUS_PER_NODE": GPUS,
        "SKYPILOT_TASK_ID": "$PENSTOCK_JOB_ID",
        "DSTACK_NODES_NUM": "${WORLD_SIZE:-1}",
        "DSTACK_NODE_RANK": "${RANK:-0}",
        "DSTACK_MASTER_NODE_IP": "${MASTER_ADDR:-127.0.0.1}",
        "DSTACK_NODES_IPS": "${MASTER_ADDR:-127.0.0.1}",
        "DSTACK_GPUS_PER_NODE": GPUS,
        "DSTACK_GPUS_NUM": f"$((${{WORLD_SIZE:-1}} * {GPUS}))",
        "DSTACK_RUN_NAME": "$PENSTOCK_JOB_ID",
    }
)
"""Variable of another scheduler → the same in a worker of Penstock. A node there is a worker here."""
TASK_OF_AN_ARRAY = frozenset(f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "COUNT", "MIN", "MAX", "STEP"))
"""Variables that the note about the array itself is about."""
PARTLY: Mapping[str, str] = MappingProxyType(
    {
        "SKYPILOT_NODE_IPS": "has the address of rank 0 alone, MASTER_ADDR",
        "DSTACK_NODES_IPS": "has the address of rank 0 alone, MASTER_ADDR",
        "SLURM_JOB_NODELIST": "has the address of rank 0 alone, MASTER_ADDR",
        "SLURM_NODELIST": "has the address of rank 0 alone, MASTER_ADDR",
        "SLURM_JOB_NAME": "is the job's id",
        **dict.fromkeys(
            ("SLURM_JOB_ID", "SLURM_JOBID"), "is a number made of the job's id, the same in all workers"
        ),
    }
)
FUNCTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "srun": (
            "srun() { local at=; while :; do case ${1-} in -w*|--nodelist*) at=1;; esac; case ${1-} in "
            "--*=*|-[a-zA-Z]?*|-u|-l|--exclusive|--exact|--label|--overlap|--pty|--unbuffered|"
            "--kill-on-bad-exit) "
            "shift;; -*) shift 2;; *) break;; esac; done; "
            'if [ "$at" ] && [ "${1-}" = hostname ]; then echo "${MASTER_ADDR:-127.0.0.1}"; else "$@"; fi; }',
            "each worker runs the whole script, so that it starts its command once, in the same worker; "
            "`hostname` on a node of the list is the address of rank 0, and `$$` or `date` differ between "
            "workers",
        ),
        "scontrol": (
            'scontrol() { echo "${MASTER_ADDR:-127.0.0.1}"; }',
            "prints the address of rank 0 alone, MASTER_ADDR",
        ),
    }
)
"""Program of another scheduler → a function of the shell in its place, and how that differs."""
ABSENT: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "mpirun": ("starts processes by itself; each worker of Penstock is one process: remove it", True),
        "mpiexec": ("starts processes by itself; each worker of Penstock is one process: remove it", True),
        "sbatch": ("is not there; submit by `penstock submit`", True),
        "module": (
            "works where nodes have environment modules; else use --conda, --venv or --container",
            False,
        ),
        "conda": (
            "activates where the nodes' shells know conda; else name the environment by --conda",
            False,
        ),
        "ray": ("starts a Ray of its own, of this job's resources", False),
    }
)
"""Program that a script calls → its fate here, and whether the script cannot do without."""


def adapted(script: str, path: str, notes: Notes) -> str:
    """The script, with lines before it that give it the variables and programs of its scheduler. Notes
    what differs."""
    text = script.removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n") + "\n"
    code, lines = _code(text), []
    for name in sorted(set(re.findall(r"\$\{?((?:SLURM|SKYPILOT|DSTACK)_\w+)", code))):
        if (value := VARIABLES.get(name)) is not None:
            lines.append(f'export {name}="{value}"')
            if name in PARTLY:
                notes.append(Note(f"{path}: ${name}", PARTLY[name]))
        elif name not in TASK_OF_AN_ARRAY:
            notes.append(Note(f"{path}: ${name}", "is not set here", True))
    if re.search(r"\$\{?RANDOM\b", code) and uses_srun(code):
        lines.append("RANDOM=${MASTER_PORT:-1}  # the same numbers in all workers")
    for name, (function, differs) in FUNCTIONS.items():
        if _calls(code, name):
            lines.append(function)
            notes.append(Note(f"{path}: {name}", differs))
    for name, (fate, needed) in ABSENT.items():
        if _calls(code, name):
            notes.append(Note(f"{path}: {name}", fate, needed))
    if not lines:
        return text
    first, _, rest = text.partition("\n")
    before = "\n".join(lines)
    return f"{first}\n{before}\n{rest}" if first.startswith("#!") else f"{before}\n{text}"


def _calls(code: str, program: str) -> bool:
    return (
        re.search(rf"(?:^|[;&|(`]|\$\(|\bexec|\btime|\bthen|\bdo)\s*{program}\b", code, re.MULTILINE)
        is not None
    )


def uses_srun(script: str) -> bool:
    return any(_calls(_code(script), name) for name in ("srun", "mpirun", "mpiexec"))


def _code(script: str) -> str:
    """Without lines of comment."""
    return "\n".join(line for line in script.split("\n") if not line.lstrip().startswith("#"))
