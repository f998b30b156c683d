"""Ray's jobs as job files: the JSON of its API, Anyscale's YAML, and the manifest RayJob of KubeRay."""

import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml

from penstock.imports.amounts import duration
from penstock.imports.keys import Imported, Keys, Notes
from penstock.imports.kubernetes import KIND_ALONE, named
from penstock.imports.shell import adapted

OWN_RAY = (
    "the job starts a Ray of its own on its resources; for several nodes run `ray start` in each "
    "worker, rank 0 with --head"
)
JOB: Mapping[str, str] = MappingProxyType(
    {
        "entrypoint_resources": "jobs have GPUs, cores and memory alone",
        "compute_config": "jobs run on the nodes of this cell",
        "cloud": "jobs run on the nodes of this cell",
        "project": "write `labels`",
        "queue_name": "the cell has one queue",
        "containerfile": "build the image, and name it by `environment: {container: IMAGE}`",
    }
)
RUNTIME: Mapping[str, str] = MappingProxyType(
    {
        "py_modules": "put them into the folder that is sent (`sync`)",
        "uv": "begin the script with `uv pip install …`",
        "nsight": "start the profiler in the script",
        "config": "it is for Ray's own environments",
        "excludes": "list them in .penstockignore",
        "worker_process_setup_hook": "call it in the script",
    }
)
CLUSTER: Mapping[str, str] = MappingProxyType(
    {
        "rayClusterSpec": OWN_RAY,
        "clusterSelector": OWN_RAY,
        "suspend": "hold the job after its submission: penstock hold JOB",
        "submitterPodTemplate": "no pod submits it",
    }
)


def is_job(found: Mapping[str, Any]) -> bool:
    """Whether a mapping is a body of Ray's API for jobs, or Anyscale's file."""
    marks = (
        "runtime_env",
        "entrypoint_num_gpus",
        "entrypoint_num_cpus",
        "submission_id",
        "compute_config",
        "entrypoint_memory",
    )
    return isinstance(found.get("entrypoint"), str) and any(mark in found for mark in marks)


def convert(found: Mapping[str, Any]) -> Imported:
    notes: Notes = []
    job = Keys(found, "", notes)
    fields: dict[str, Any] = {}
    name = job.text("name") or job.text("submission_id") or job.text("job_id")
    if name is not None:
        fields["name"] = name
    job.ignore("job_id", "submission_id")
    asked = {
        "gpus": _gpus(job, "entrypoint_num_gpus"),
        "cores": _gpus(job, "entrypoint_num_cpus") or None,
    }
    if (memory_bytes := job.whole("entrypoint_memory")) is not None:
        asked["host_memory"] = max(1, -(-memory_bytes // 2**20))
    fields["resources"] = {key: value for key, value in asked.items() if value is not None}
    fields |= job.retries("max_retries")
    if (text := job.text("timeout_s")) is not None:
        fields["run_timeout"] = duration(text)
    fields |= job.strings("metadata", "labels")
    runtime = job.part("runtime_env")
    more, before = _runtime(runtime)
    top, top_before = _runtime(
        Keys(
            {key: job.take(key) for key in ("working_dir", "env_vars", "image_uri", "pip", "requirements")},
            "",
            notes,
        )
    )
    fields |= more | top
    _entry(job, "entrypoint", [*before, *top_before], fields)
    job.rest(JOB)
    return Imported("a job of Ray", [fields], notes)


def _gpus(job: Keys, name: str) -> int:
    """A number of GPUs or cores, rounded up; a part of one is named."""
    text = job.text(name)
    try:
        number = float(text or 0)
    except ValueError:
        job.note(name, "is not a number; left out", needed=True)
        return 0
    if number % 1:
        job.note(name, f"{number:g} is rounded up; `gpu_share` is a part of one GPU")
    return int(-(-number // 1))


def _entry(job: Keys, name: str, before: list[str], fields: dict[str, Any]) -> None:
    entry = job.text(name)
    if entry is None:
        job.note(name, "is missing; there is nothing to run", needed=True)
        return
    try:
        words = shlex.split(entry)
    except ValueError:
        words = []
    plain = words and not before and not any(mark in entry for mark in "$;&|<>*`~\n") and "=" not in words[0]
    if plain:
        fields["command"] = words
    else:
        fields["script"] = adapted("\n".join([*before, entry]) + "\n", name, job.notes)


def _runtime(runtime: Keys) -> tuple[dict[str, Any], list[str]]:
    """Fields by the runtime environment, and the lines of a script before the entry point."""
    fields: dict[str, Any] = {}
    before: list[str] = []
    folder = runtime.text("working_dir")
    if folder is not None and "://" in folder:
        runtime.note(
            "working_dir",
            "is not a folder of this machine; fetch it in the script, or give `sync`",
            needed=True,
        )
    elif folder is not None:
        fields["sync"] = folder
    variables = runtime.part("env_vars")
    if variables.found:
        fields["env"] = {name: variables.text(name) or "" for name in variables.found}
    for name in ("pip", "requirements"):
        packages = runtime.take(name)
        if isinstance(packages, Mapping):
            packages = packages.get("packages")
        if isinstance(packages, list):
            before.append(f"pip install {shlex.join(map(str, packages))}")
        elif isinstance(packages, str):
            before.append(f"pip install -r {shlex.quote(packages)}")
        if packages:
            runtime.note(
                name,
                "is installed at the start of each attempt, into the job's own environment (`--venv`, "
                "`--conda`)",
            )
    conda = runtime.take("conda")
    if isinstance(conda, str):
        fields["environment"] = {"conda": conda}
    elif conda is not None:
        runtime.note(
            "conda",
            "make the environment on the nodes, and name it by `environment: {conda: NAME}`",
            needed=True,
        )
    image = runtime.text("image_uri") or runtime.part("container").text("image")
    if image is not None:
        fields["environment"] = {"container": image}
    runtime.rest(RUNTIME)
    return fields, before


def convert_manifest(found: Mapping[str, Any]) -> Imported:
    """KubeRay's RayJob."""
    notes: Notes = []
    manifest = Keys(found, "", notes)
    manifest.ignore(*KIND_ALONE)
    fields = named(manifest.part("metadata"))
    spec = manifest.part("spec")
    fields["resources"] = {"gpus": _gpus(spec, "entrypointNumGpus")}
    if (cores := _gpus(spec, "entrypointNumCpus")) > 0:
        fields["resources"]["cores"] = cores
    fields |= spec.seconds("activeDeadlineSeconds", "run_timeout") | spec.retries("backoffLimit")
    text = spec.text("runtimeEnvYAML")
    try:
        environment = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        environment = None
        spec.note("runtimeEnvYAML", "is not valid YAML; left out", needed=True)
    more, before = _runtime(Keys(environment, "spec.runtimeEnvYAML", notes))
    fields |= more
    _cluster(spec, fields)
    _entry(spec, "entrypoint", before, fields)
    spec.ignore("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "submissionMode", "jobId", "metadata")
    spec.rest(CLUSTER)
    manifest.rest({})
    return Imported("a RayJob of KubeRay", [fields], notes)


def _cluster(spec: Keys, fields: dict[str, Any]) -> None:
    """Groups of workers: of a single one its image and GPUs count; each group is named."""
    cluster = spec.part("rayClusterSpec")
    cluster.ignore("rayVersion", "enableInTreeAutoscaling", "autoscalerOptions")
    for group in [cluster.part("headGroupSpec"), *cluster.parts("workerGroupSpecs")]:
        if not group.found:
            continue
        boxes = group.part("template").part("spec").found.get("containers")
        box = boxes[0] if isinstance(boxes, list) and boxes and isinstance(boxes[0], Mapping) else {}
        image = box.get("image")
        if isinstance(image, str):
            fields.setdefault("environment", {"container": image})
        limits = (
            (box.get("resources") or {}).get("limits") if isinstance(box.get("resources"), Mapping) else None
        )
        gpus = limits.get("nvidia.com/gpu") if isinstance(limits, Mapping) else None
        if gpus is not None and str(gpus).isdecimal() and not fields["resources"].get("gpus"):
            fields["resources"]["gpus"] = int(str(gpus))
        replicas = group.found.get("replicas", 1)
        group.note("", f"{replicas} × {gpus or 0} GPUs have no equivalent; {OWN_RAY}")
    cluster.rest({})
