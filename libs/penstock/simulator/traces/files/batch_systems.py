"""Importers of batch systems' exports: Slurm's `sacct`, Helios' CSV files, Kubernetes' lists of jobs and
pods.

Lines that are not jobs of a trace are skipped and counted: the steps of a Slurm job, jobs that never ran. A
job that still runs counts with its time so far if the file has that. Names consist of letters, digits and . _
: / -; any other character of a user's name becomes a `-`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.runtime.files.csv_import import MAX_NAME, Row, shown
from penstock.simulator.traces.files.fields import (
    MAX_CORES,
    MAX_GANG_GPUS,
    MAX_MEMORY_MIB,
    MAX_WORKERS,
    Format,
    job_id,
    moment,
    number,
    span,
    whole,
)
from penstock.simulator.traces.jobs import TraceJob

NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._:/-]")
AMOUNT = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGTPE]?)")
MIB = {"": 1.0, "K": 2**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30, "E": 2.0**40}
"""Slurm's units of memory; a number without a unit is in MiB."""
QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
    "Pi": 2.0**50,
    "Ei": 2.0**60,
}
"""Kubernetes' suffixes of a quantity."""
GPU, GPU_OF = "gres/gpu", "gres/gpu:"
NOT_YET = frozenset({"", "None", "Unknown"})
STEPS, NEVER_RAN, NOT_ENDED = "job steps", "jobs that never ran", "jobs that have not ended"
PODS_OF_JOBS = "pods of jobs in the list"
SACCT_NAMES = MappingProxyType(
    {"jobid": "JobID", "submit": "Submit", "elapsed": "Elapsed", "alloctres": "AllocTRES"}
)
"""Column names as `sacct` prints them; they are read in upper or lower case."""
SACCT_COMMAND = "sacct -P -X --format=JobID,User,State,Submit,Start,End,Elapsed,ReqTRES,AllocTRES"


def user_name(row: Row, column: str) -> str:
    """A user's name with other characters replaced by `-`."""
    text = NOT_IN_A_NAME.sub("-", row.text(column)).lstrip("._:/-")
    return text[:MAX_NAME]


def _divided(row: Row, column: str, gpus: int) -> int | None:
    """Number of nodes as the number of workers, if it divides the GPUs."""
    nodes = row.whole(column, least=0) if row.has(column) else 0
    return nodes if 0 < nodes <= MAX_WORKERS and gpus % nodes == 0 else None


def _check_gang(row: Row, column: str, job: TraceJob) -> TraceJob:
    if job.gpus > MAX_GANG_GPUS:
        return row.bad(column, f"{job.gpus} exceed {MAX_GANG_GPUS} GPUs", job)
    if not job.gpus and not job.cores:
        return row.bad(column, "neither cores nor GPUs", job)
    return job


# ------------------------------------------------------------------------------------------------- sacct


def _tres(row: Row, column: str) -> Mapping[str, float]:
    """Counts by resource of `cpu=8,gres/gpu:a100=2,mem=64G,node=1`; memory in MiB."""
    found: dict[str, float] = {}
    for part in row.text(column).split(",") if row.has(column) else ():
        name, equals, text = part.rpartition("=")
        if not equals:
            return row.bad(column, f"{shown(part)!r} is not a list of name=count", {})
        match = AMOUNT.fullmatch(text)
        if match is None:
            return row.bad(column, f"{shown(part)} is not an amount", {})
        found[name] = float(match[1]) * (MIB[match[2]] if name == "mem" else 1.0)
    return found


def _resources(row: Row) -> tuple[str, Mapping[str, float]]:
    """The job's allocation, or its request if no allocation is recorded; with the column's name."""
    column = "alloctres" if row.has("alloctres") else "reqtres"
    return column, _tres(row, column)


def _gpus_of(tres: Mapping[str, float]) -> int:
    """GPUs of any model, or the sum of those by model."""
    typed = sum(count for name, count in tres.items() if name.startswith(GPU_OF))
    return int(tres.get(GPU, typed))


def _sacct_job(row: Row, job: TraceJob) -> TraceJob:
    column, held = _resources(row)
    if row.problems:
        return job
    asked = _tres(row, "reqtres")
    gpus, nodes = _gpus_of(held), int(held.get("node", 0))
    models = sorted(name.removeprefix(GPU_OF) for name in asked if name.startswith(GPU_OF))
    memory_mib = min(round(held.get("mem", 0.0)), MAX_MEMORY_MIB)
    found = job._replace(
        duration_s=_elapsed_s(row),
        gpus=gpus,
        owner=user_name(row, "user") or user_name(row, "account"),
        cores=min(held["cpu"], MAX_CORES) if held.get("cpu") else None,
        host_memory_mib=memory_mib or None,
        gpu_models=tuple(models),
        workers=nodes if 0 < nodes <= MAX_WORKERS and gpus % nodes == 0 else None,
    )
    return _check_gang(row, column, found)


def _elapsed_s(row: Row) -> float:
    """Run time > 0, from the first column that has it: exact seconds, a clock time,
    or the end less the start."""
    for column in ("elapsedraw", "elapsed"):
        if row.has(column):
            return row.span_s(column, above=0)
    return max(0.0, row.moment_s("end") - row.moment_s("start"))


def _sacct_passes(row: Row) -> str:
    if "." in (row.text("jobid") or row.text("jobidraw")):
        return STEPS
    started = not row.knows("start") or row.text("start") not in NOT_YET
    lasted = [row.text(column) for column in ("elapsedraw", "elapsed") if row.has(column)]
    if not started or any(text in ("0", "00:00:00") for text in lasted):
        return NEVER_RAN
    return NOT_ENDED if not lasted and row.text("end") in NOT_YET else ""


def _slurm_id(row: Row, column: str) -> str:
    """`101`, `102_7` of an array, `103+1` of a heterogeneous job."""
    text = (row.text("jobid") or row.text("jobidraw")).replace("+", "-")
    return row.checked_name(column, text, MAX_JOB_ID_CHARS)


# ------------------------------------------------------------------------------------------------ helios


def _helios_job(row: Row, job: TraceJob) -> TraceJob:
    found = job._replace(cores=job.cores or None, workers=_divided(row, "node_num", job.gpus))
    return _check_gang(row, "gpu_num", found)


def _helios_passes(row: Row) -> str:
    lasted = row.text("duration")
    waits = row.knows("start_time") and row.text("start_time") in NOT_YET
    return NEVER_RAN if waits or lasted in ("", "0", "0.0", "None") else ""


# -------------------------------------------------------------------------------------------- kubernetes

GPU_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "gpu.nvidia.com/class",
)
"""Labels of nodes that name the model of their GPUs: NVIDIA's own, Google's, CoreWeave's."""


def kubernetes_name(item: Mapping[str, Any]) -> str:
    """Namespace and name."""
    meta = _part(item, "metadata")
    return f"{meta.get('namespace', 'default')}/{meta.get('name', '')}"


def kubernetes_values(item: Mapping[str, Any], listed: Collection[str]) -> dict[str, str]:
    """A Job, or a Pod by itself, as one line: per pod the sum of its containers' requests. Missing fields are
    empty.

    `listed`: names of Jobs whose pods do not count as jobs.
    """
    meta, spec, status = (_part(item, name) for name in ("metadata", "spec", "status"))
    if item.get("kind") == "Pod":
        return _texts(item, meta, spec) | _pod_times(meta, status, listed)
    pod = _part(_part(spec, "template"), "spec")
    ends = [
        one.get("lastTransitionTime", "")
        for one in _list(status, "conditions")
        if one.get("type") in ("Complete", "Failed") and one.get("status") == "True"
    ]
    pods = [int(spec[name]) for name in ("parallelism", "completions") if isinstance(spec.get(name), int)]
    return _texts(item, meta, pod) | {
        "startTime": _text(status.get("startTime")),
        "completionTime": _text(status.get("completionTime") or next(iter(ends), "")),
        "parallelism": str(min(pods, default=1)),
    }


def _texts(item: Mapping[str, Any], meta: Mapping[str, Any], pod: Mapping[str, Any]) -> dict[str, str]:
    """Fields that Jobs and Pods have in common."""
    selector = _part(pod, "nodeSelector")
    found = {
        "name": kubernetes_name(item),
        "namespace": meta.get("namespace", "default"),
        "creationTimestamp": meta.get("creationTimestamp", ""),
        "nodeSelector": next((selector[label] for label in GPU_LABELS if label in selector), ""),
    }
    found |= {name: ",".join(texts) for name, texts in _asked(pod).items()}
    return {name: _text(value) for name, value in found.items()}


def _pod_times(meta: Mapping[str, Any], status: Mapping[str, Any], listed: Collection[str]) -> dict[str, str]:
    """Start and end of a Pod. It ends with its last container; a Pod that was evicted before any of them ran
    has neither."""
    ends = [
        _text(_part(_part(container, "state"), "terminated").get("finishedAt"))
        for container in _list(status, "containerStatuses")
    ]
    ended = status.get("phase") in ("Succeeded", "Failed")
    began = _text(status.get("startTime")) if max(ends, default="") or not ended else ""
    owners = (one.get("name") for one in _list(meta, "ownerReferences") if one.get("kind") == "Job")
    of_job = any(f"{meta.get('namespace', 'default')}/{owner}" in listed for owner in owners)
    return {
        "startTime": began,
        "completionTime": max(ends, default="") if ended else "",
        "parallelism": "1",
        "ownerReferences": "listed" if of_job else "",
    }


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = whole.get(name)
    return found if isinstance(found, dict) else {}


def _list(whole: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    found = whole.get(name)
    return (one for one in found if isinstance(one, dict)) if isinstance(found, list) else iter(())


def _asked(pod: Mapping[str, Any]) -> Mapping[str, list[str]]:
    """Quantities of all containers by resource; a request takes precedence over a limit. `limits`: slices of
    GPUs, which cannot be read."""
    found: dict[str, list[str]] = {"cpu": [], "memory": [], "nvidia.com/gpu": [], "limits": []}
    for container in _list(pod, "containers"):
        resources = _part(container, "resources")
        wanted = {**_part(resources, "limits"), **_part(resources, "requests")}
        for name, amount in wanted.items():
            if name.endswith(".com/gpu"):
                found["nvidia.com/gpu"].append(str(amount))
            elif ".com/mig-" in name:
                found["limits"].append(name)
            elif name in found:
                found[name].append(str(amount))
    return found


def _quantity(row: Row, column: str) -> float:
    """The sum over the containers."""
    total = 0.0
    for text in row.text(column).split(",") if row.has(column) else ():
        match = QUANTITY.fullmatch(text)
        if match is None:
            return row.bad(column, f"{shown(text)!r} is no quantity", 0.0)
        total += float(match[1]) * UNITS[match[2] or ""]
    return total


def _pod_gpus(row: Row, column: str) -> int:
    """GPUs of all pods."""
    if row.has("limits"):
        return row.bad("limits", f"{row.text('limits')}: slices of a GPU are not read", 0)
    texts = row.text(column).split(",") if row.has(column) else []
    if not all(text.isdecimal() for text in texts):
        return row.bad(column, f"{shown(row.text(column))!r} is not a whole number ≥ 0", 0)
    return sum(map(int, texts)) * max(1, int(row.text("parallelism")))


def _kubernetes_job(row: Row, job: TraceJob) -> TraceJob:
    pods = max(1, int(row.text("parallelism")))
    ran_s = row.moment_s("completionTime") - row.moment_s("startTime")
    if row.problems:
        return job
    if ran_s < 0:
        return row.bad("completionTime", "it lies before startTime", job)
    if pods > MAX_WORKERS:
        return row.bad("parallelism", f"{pods} pods; at most {MAX_WORKERS}", job)
    cores, memory_mib = _quantity(row, "cpu") * pods, round(_quantity(row, "memory") * pods / 2**20)
    found = job._replace(
        duration_s=max(1.0, ran_s),  # Kubernetes counts whole seconds
        cores=min(cores, MAX_CORES) or None,
        host_memory_mib=min(memory_mib, MAX_MEMORY_MIB) or None,
        workers=pods,
    )
    if not found.gpus and found.cores is None:
        found = found._replace(cores=float(pods))  # a pod without a request gets a core, as elsewhere
    return _check_gang(row, "nvidia.com/gpu", found)


def _kubernetes_passes(row: Row) -> str:
    if row.has("ownerReferences"):
        return PODS_OF_JOBS
    return NEVER_RAN if not row.has("startTime") else "" if row.has("completionTime") else NOT_ENDED


def _gpu_model(row: Row, column: str) -> tuple[str, ...]:
    return (row.name(column),)


BATCH_SYSTEMS: Mapping[str, Format] = MappingProxyType(
    {
        "sacct": Format(
            ("jobid", "submit", "elapsed", "alloctres"),
            {
                "job_id": ("jobid", _slurm_id),
                "submit_s": ("submit", moment()),
                "gpus": ("alloctres", lambda row, column: 0),
            },
            optional=("user", "account", "state", "start", "end", "elapsedraw", "reqtres", "jobidraw"),
            check=_sacct_job,
            passes=_sacct_passes,
            instead={
                "jobid": (("jobidraw",),),
                "elapsed": (("elapsedraw",), ("start", "end")),
                "alloctres": (("reqtres",),),
            },
        ),
        "helios": Format(
            ("job_id", "gpu_num", "submit_time", "duration"),
            {
                "job_id": ("job_id", job_id),
                "submit_s": ("submit_time", moment()),
                "duration_s": ("duration", span()),
                "gpus": ("gpu_num", whole(MAX_GANG_GPUS, least=0)),
                "owner": ("user", user_name),
                "cores": ("cpu_num", number(most=MAX_CORES)),
            },
            optional=("user", "cpu_num", "node_num", "start_time", "state"),
            check=_helios_job,
            passes=_helios_passes,
        ),
        "kubernetes": Format(
            ("name", "namespace", "creationTimestamp", "startTime", "completionTime", "nvidia.com/gpu"),
            {
                "job_id": ("name", job_id),
                "owner": ("namespace", user_name),
                "submit_s": ("creationTimestamp", moment()),
                "gpus": ("nvidia.com/gpu", _pod_gpus),
                "gpu_models": ("nodeSelector", _gpu_model),
            },
            optional=("nodeSelector", "parallelism", "cpu", "memory", "limits", "ownerReferences"),
            check=_kubernetes_job,
            passes=_kubernetes_passes,
        ),
    }
)
