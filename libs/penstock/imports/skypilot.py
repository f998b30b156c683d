"""SkyPilot's task files as job files: setup and run are one script, nodes are workers, accelerators are
GPUs of each."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.imports.amounts import amount
from penstock.imports.keys import Imported, Keys, Notes
from penstock.imports.shell import adapted
from penstock.model.jobs.job_parts import MAX_ATTEMPTS

CLOUD = "jobs run on the nodes of this cell"
TASK: Mapping[str, str] = MappingProxyType(
    {
        "service": "a job runs to its end and serves no requests",
        "file_mounts": "nodes read folders that they share (`workdir`); `sync` sends one folder of code",
        "storage_mounts": "nodes read folders that they share (`workdir`)",
        "volumes": "nodes read folders that they share (`workdir`)",
        "inputs": "nodes read folders that they share (`workdir`)",
        "outputs": "write to a folder that the nodes share",
        "event_callback": "follow `penstock events --follow`",
        "config": CLOUD,
        "experimental": CLOUD,
        "pool": CLOUD,
    }
)
RESOURCES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "cloud",
                "infra",
                "region",
                "zone",
                "instance_type",
                "autostop",
                "network_tier",
                "max_hourly_cost",
            ),
            CLOUD,
        ),
        **dict.fromkeys(("disk_size", "disk_tier", "local_disk"), "disks are those of the nodes"),
        "ports": "workers reach each other by MASTER_ADDR and MASTER_PORT",
        "accelerator_args": "install what the job needs in its environment",
        "any_of": "write all that would do in `gpu_models`",
        "ordered": "write all that would do in `gpu_models`",
    }
)
STRONG = ("num_nodes", "envs", "setup", "file_mounts", "service")
STRONG_RESOURCES = ("accelerators", "cloud", "use_spot", "instance_type", "infra", "any_of", "disk_size")


def is_task(found: Mapping[str, Any], *, asked: bool) -> bool:
    """Whether a file is one of SkyPilot's. `asked`: it is not one of ours, so that `run` is enough."""
    if "command" in found or "script" in found or "apiVersion" in found:
        return False
    resources = found.get("resources")
    strong = any(key in found for key in STRONG) or (
        isinstance(resources, Mapping) and any(key in resources for key in STRONG_RESOURCES)
    )
    return ("run" in found or "setup" in found) and (strong or asked)


def convert(found: Mapping[str, Any]) -> Imported:
    notes: Notes = []
    task = Keys(found, "", notes)
    fields = task.same("name", "name")
    if (nodes := task.whole("num_nodes")) is not None and nodes > 1:
        fields["workers"] = nodes
    fields |= _resources(task.part("resources"))
    folder = task.take("workdir")
    if isinstance(folder, str):
        fields["sync"] = folder
    elif folder is not None:
        task.note(
            "workdir", "is not a folder of this machine; clone it in the script, or give `sync`", needed=True
        )
    fields |= _variables(task)
    task.own_priority()
    script = "\n".join(part.rstrip("\n") for name in ("setup", "run") if (part := task.text(name)))
    if task.text("run") is None:
        task.note("run", "is missing; there is nothing to run", needed=True)
    elif script.strip():
        fields["script"] = adapted(script + "\n", "run", notes)
    if "setup" in task:
        task.note("setup", "runs at the start of each attempt, in each worker")
    task.rest(TASK, needed=frozenset(("service",)))
    return Imported("a SkyPilot file", [fields], notes)


def _variables(task: Keys) -> dict[str, Any]:
    envs, secrets = task.part("envs"), task.part("secrets")
    env: dict[str, str] = {}
    for name in envs.found:
        value = envs.text(name)
        if value is None:
            envs.note(name, "has no value; give it by -e at the submission", needed=True)
        else:
            env[name] = value
    named = {name: name for name in secrets.found}
    for name in named:
        secrets.note(name, f"nodes need a secret named {name}; its value is in no job file")
    return {key: value for key, value in (("env", env), ("secrets", named)) if value}


def _resources(resources: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for name, field in (("cpus", "cores"), ("memory", "host_memory")):
        if (text := resources.text(name)) is not None:
            asked |= amount(resources, name, text, field)
    models, gpus, share = accelerators(resources, "accelerators")
    asked["gpus"] = gpus
    if share is not None:
        asked["gpu_share"] = share
    if models:
        found["gpu_models"] = models
    if resources.take("use_spot") is not None:
        resources.note(
            "use_spot",
            "any job may be stopped for another one; `preemptible: false` is for those that may not",
        )
    image = resources.take("image_id")
    if isinstance(image, str) and image.startswith("docker:"):
        found["environment"] = {"container": image.removeprefix("docker:")}
    elif image is not None:
        resources.note("image_id", f"has no equivalent; {CLOUD}")
    found |= _recovery(resources)
    found |= resources.strings("labels", "labels")
    resources.rest(RESOURCES, needed=frozenset(("any_of", "ordered")))
    return {**found, "resources": asked}


def _recovery(resources: Keys) -> dict[str, Any]:
    """Restarts after errors, of `job_recovery`."""
    recovery = resources.take("job_recovery")
    restarts = recovery.get("max_restarts_on_errors") if isinstance(recovery, Mapping) else None
    resources.ignore("spot_recovery")  # a job that was stopped queues again by itself
    if isinstance(restarts, int) and restarts > 0:
        return {"retry": {"max_attempts": min(MAX_ATTEMPTS, restarts + 1)}}
    return {}


def accelerators(resources: Keys, name: str) -> tuple[list[str], int, float | None]:
    """Models, GPUs of each worker, and the share where it is a part of one GPU."""
    value = resources.take(name)
    if value is None:
        return [], 0, None
    pairs: list[tuple[str, str]] = []
    items = (
        list(value.items()) if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
    )
    for item in items:
        model, number = (
            item if isinstance(item, tuple) else str(item).split(":", 1) if ":" in str(item) else (item, 1)
        )
        pairs.append((str(model).strip(), str(number or 1).strip()))
    models = [model for model, _ in pairs if model]
    try:
        counts = {float(number) for _, number in pairs}
    except ValueError:
        counts = set()
    if not models or not counts:
        resources.note(name, "is not a list of accelerators; write `gpus` and `gpu_models`", needed=True)
        return [], 0, None
    if any(model.lower().startswith("tpu") for model in models):
        resources.note(name, "TPUs have no equivalent; there are GPUs alone", needed=True)
        return [], 0, None
    if len(counts) > 1:
        resources.note(
            name, f"different numbers of GPUs by model; {max(counts):g} is taken for each", needed=True
        )
    most = max(counts)
    return models, max(1, int(most)), most if most < 1 else None
