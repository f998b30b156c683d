"""dstack's configurations as job files: a task's commands are one script, its nodes are workers."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.imports.amounts import amount, duration, least, memory
from penstock.imports.keys import Imported, Keys, Notes
from penstock.imports.shell import adapted

TYPES = frozenset(("task", "dev-environment", "service", "fleet", "gateway", "volume"))
CLOUD = "jobs run on the nodes of this cell"
FOLDERS = "nodes read folders that they share (`workdir`); `sync` sends one folder of code"
TASK: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "backends",
                "regions",
                "availability_zones",
                "instance_types",
                "max_price",
                "creation_policy",
                "idle_duration",
                "fleets",
                "reservation",
                "spot_policy",
                "pool_name",
                "instance_name",
                "instances",
            ),
            CLOUD,
        ),
        **dict.fromkeys(("volumes", "repos", "files"), FOLDERS),
        "ports": "workers reach each other by MASTER_ADDR and MASTER_PORT",
        "python": "programs come from the nodes' PATH; name a place by --venv, --conda or --container",
        "nvcc": "programs come from the nodes' PATH; name a place by --venv, --conda or --container",
        "registry_auth": "log in to the registry on the nodes",
        "user": "a job runs as the node's task user",
        "privileged": "a job has its own GPUs and no other rights",
        "docker": "a job has its own GPUs and no other rights",
        "entrypoint": "begin the script with it",
        "utilization_policy": "`penstock top` shows the use of GPUs",
        "schedule": "submit from a cron job",
        "stop_criteria": "a job ends when all of its workers have ended",
        "startup_order": "workers start together",
    }
)
MEMORY_SIZE = re.compile(
    r"[0-9.]+\s*[GMT]i?B?(?:\.\.(?:[0-9.]+\s*[GMT]i?B?)?)?|\.\.[0-9.]+\s*[GMT]i?B?", re.IGNORECASE
)
SECRET = re.compile(r"\$\{\{\s*secrets\.([\w.-]+)\s*\}\}")
COUNT = re.compile(r"[0-9]*\.?\.?[0-9]*")
VENDORS = ("nvidia", "amd", "intel", "google", "tpu", "tenstorrent")


def convert(found: Mapping[str, Any]) -> Imported:
    notes: Notes = []
    task = Keys(found, "", notes)
    kind = task.text("type") or "task"
    if kind != "task":
        task.note("type", f"{kind} has no equivalent; only a task runs to its end", needed=True)
        return Imported("a dstack file", [], notes)
    fields = task.same("name", "name")
    if (nodes := task.whole("nodes")) is not None and nodes > 1:
        fields["workers"] = nodes
    fields |= _resources(task.part("resources"))
    if (image := task.text("image")) is not None:
        fields["environment"] = {"container": image}
    fields |= _variables(task) | _limits(task)
    fields |= task.same("working_dir", "workdir")
    fields["sync"] = "."
    fields |= task.strings("tags", "labels")
    commands = task.texts("commands")
    shell = task.text("shell") or "bash"
    if commands:
        script = "\n".join(commands) + "\n"
        fields["script"] = adapted(
            script if shell == "bash" else f"#!/bin/{shell} -e\n{script}", "commands", notes
        )
    else:
        task.note("commands", "is missing; there is nothing to run", needed=True)
    task.own_priority()
    task.rest(TASK)
    return Imported("a dstack file", [fields], notes)


def _variables(task: Keys) -> dict[str, Any]:
    """`env`: `NAME=VALUE`, `NAME` alone (of the submitter's environment), or a mapping."""
    if isinstance(task.found.get("env"), Mapping):
        part = task.part("env")
        found: dict[str, Any] = {"env": {name: part.text(name) or "" for name in part.found}}
    else:
        found = task.assignments("env")
    secrets = {
        name: named[1] for name, text in found.get("env", {}).items() if (named := SECRET.fullmatch(text))
    }
    for name, secret in secrets.items():
        del found["env"][name]
        task.note(f"env.{name}", f"nodes need a secret named {secret}")
    return found | ({"secrets": secrets} if secrets else {})


def _limits(task: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in (("max_duration", "run_timeout"), ("stop_duration", "grace")):
        if (text := task.text(name)) is not None:
            try:
                limit = duration(text)
            except ValueError as error:
                task.note(name, str(error), needed=True)
                continue
            if limit is not None:
                found[field] = limit
    retry = task.take("retry")
    if retry:
        found["retry"] = {"max_attempts": 3}
        task.note(
            "retry", "has a number of attempts here, 3; a job whose node is lost queues again in any case"
        )
    return found


def _resources(resources: Keys) -> dict[str, Any]:
    asked: dict[str, Any] = {"gpus": 0}
    found: dict[str, Any] = {}
    for name, field in (("cpu", "cores"), ("memory", "host_memory")):
        value = resources.take(name)
        text = value.get("count") if isinstance(value, Mapping) else value
        if text is None:
            continue
        asked |= amount(resources, name, str(text).rpartition(":")[2], field)
    gpu = resources.take("gpu")
    if gpu is not None:
        models, count, size = _gpu(resources, gpu)
        asked["gpus"] = count
        if size:
            asked["gpu_memory"] = size
        if models:
            found["gpu_models"] = models
    resources.ignore("shm_size")  # /dev/shm is the task's own, and may use all of its memory
    resources.rest({"disk": "disks are those of the nodes"})
    return {**found, "resources": asked}


def _gpu(resources: Keys, gpu: object) -> tuple[list[str], int, str | None]:
    """(models, GPUs, memory of each) of `24GB`, `A100:80GB:2`, `2`, or a mapping."""
    if isinstance(gpu, Mapping):
        part = resources.part("gpu")
        models, count, size = part.texts("name"), part.text("count") or "1", part.text("memory") or ""
        part.ignore("vendor")
        part.rest(
            {"total_memory": "write the memory of each GPU", "compute_capability": "write `gpu_models`"}
        )
    else:
        models, count, size = [], "1", ""
        for word in str(gpu).split(":"):
            if MEMORY_SIZE.fullmatch(word):
                size = word
            elif COUNT.fullmatch(word):
                count = word
            elif word.lower() not in VENDORS:
                models = [name.strip() for name in word.split(",")]
    low, ranged = least(count)
    low_size, ranged_size = least(size)
    if ranged or ranged_size:
        resources.note("gpu", "is a range; its lower end is taken")
    if not low.isdecimal():
        resources.note("gpu", "has no number of GPUs that can be read; write `gpus`", needed=True)
        low = "1"
    return models, int(low), memory(low_size, bare_mib=1_024) if low_size else None
