"""Kubernetes' manifests as job files: Pod, Job, CronJob, JobSet, Volcano's Job, and the training jobs of
Kubeflow (PyTorchJob, TFJob, XGBoostJob, PaddleJob, JAXJob, TrainJob)."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from penstock.imports.amounts import GPU_LABELS, cores, memory
from penstock.imports.keys import Imported, Keys, Notes

ROLES: Mapping[str, str] = MappingProxyType(
    {
        "PyTorchJob": "pytorchReplicaSpecs",
        "TFJob": "tfReplicaSpecs",
        "XGBoostJob": "xgbReplicaSpecs",
        "PaddleJob": "paddleReplicaSpecs",
        "JAXJob": "jaxReplicaSpecs",
        "MPIJob": "mpiReplicaSpecs",
    }
)
"""Kind → its section of roles."""
SERVERS = "PS"
GPUS = re.compile(r"(nvidia|amd)\.com/gpu|gpu\.intel\.com/\w+")
UNLIMITED_RETRIES = 3  # attempts in place of restarts without a limit; a job file has at most 100
GANG = "a gang starts whole or not at all in any case"
NODES = "Penstock chooses the nodes, among those that `nodes` allows"
POD: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "tolerations",
                "affinity",
                "nodeName",
                "topologySpreadConstraints",
                "schedulerName",
                "runtimeClassName",
            ),
            NODES,
        ),
        "volumes": "folders of the nodes are seen under their own paths (`workdir`)",
        "initContainers": "begin the script with their commands (`command: |`)",
        "serviceAccountName": "a job has no identity of the cluster; give `secrets`",
        "imagePullSecrets": "log in to the registry on the nodes",
        "securityContext": "a job runs as the node's task user",
        "priorityClassName": "`priority` orders your own jobs",
        "hostNetwork": "workers reach each other by MASTER_ADDR",
    }
)
CONTAINER: Mapping[str, str] = MappingProxyType(
    {
        "volumeMounts": "folders of the nodes are seen under their own paths (`workdir`)",
        "envFrom": "write each variable in `env`, or in `secrets`",
        "lifecycle": "SIGTERM comes before each stop; `grace` is the time until SIGKILL",
        "livenessProbe": "nothing is probed",
        "securityContext": "a job runs as the node's task user",
    }
)
RUN_POLICY: Mapping[str, str] = MappingProxyType(
    {
        "suspend": "hold the job after its submission: penstock hold JOB",
        "schedulingPolicy": GANG,
    }
)
VOLCANO: Mapping[str, str] = MappingProxyType(
    {
        "minAvailable": GANG,
        "queue": "the cell has one queue, with shares of owners",
        "schedulerName": NODES,
        "plugins": "workers reach each other by MASTER_ADDR and MASTER_PORT",
        "policies": "`retry` is for failures; a job whose node is lost queues again in any case",
        "priorityClassName": "`priority` orders your own jobs",
        "volumes": "folders of the nodes are seen under their own paths (`workdir`)",
    }
)
VOLCANO_GROUP = "batch.volcano.sh/"
KIND_ALONE = ("apiVersion", "kind", "status")


def named(meta: Keys) -> dict[str, Any]:
    """`name` and `labels` of an object's metadata."""
    name = meta.text("name") or (meta.text("generateName") or "").rstrip("-")
    meta.ignore("generateName", "uid", "creationTimestamp", "resourceVersion", "generation", "managedFields")
    found: dict[str, Any] = {"name": name} if name else {}
    found |= meta.strings("labels", "labels")
    meta.rest({"namespace": "`owner` names the tenant", "annotations": "write `labels`"})
    return found


def pod_fields(pod: Keys) -> dict[str, Any]:
    """Fields of the job that a pod's specification describes: its first container, on its own."""
    found: dict[str, Any] = {}
    containers = list(pod.parts("containers"))
    if containers:
        found |= container_fields(containers[0])
    for extra in containers[1:]:
        name = extra.text("name") or "?"
        extra.note(
            "", f"has no equivalent; container {name} beside the first one: start its program in the script"
        )
    selector = pod.part("nodeSelector")
    for label in GPU_LABELS:
        if (model := selector.text(label)) is not None:
            found["gpu_models"] = [model]
    selector.rest(dict.fromkeys(selector.found, NODES))
    found |= pod.seconds("terminationGracePeriodSeconds", "grace")
    found |= pod.seconds("activeDeadlineSeconds", "run_timeout")
    policy = pod.text("restartPolicy")
    if policy in ("OnFailure", "Always"):
        found["retry"] = {"max_attempts": UNLIMITED_RETRIES}
    pod.ignore("restartPolicy", "dnsPolicy", "enableServiceLinks", "automountServiceAccountToken")
    pod.rest(POD)
    return found


def container_fields(box: Keys) -> dict[str, Any]:
    """Image, command, variables and resources of a container."""
    found: dict[str, Any] = {}
    box.ignore("name", "imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy")
    command, arguments = box.texts("command"), box.texts("args")
    if command:
        found["command"] = [*command, *arguments]
        if any("$(" in word for word in found["command"]) and command[0].rpartition("/")[2] not in (
            "sh",
            "bash",
        ):
            box.note(
                "command", "$(NAME) is filled by Kubernetes alone; write bash -c '… $NAME …'", needed=True
            )
    else:
        box.note(
            "command", "is missing: the image's own entry point is not run; write the command", needed=True
        )
        found |= {"command": arguments} if arguments else {}
    if (image := box.text("image")) is not None:
        found["environment"] = {"container": image}
    found |= box.same("workingDir", "workdir")
    found |= _variables(box)
    found |= resource_fields(box.part("resources"))
    if box.take("ports"):
        box.note("ports", "has no equivalent; workers reach each other by MASTER_ADDR and MASTER_PORT")
    box.rest(CONTAINER)
    return found


def _variables(box: Keys) -> dict[str, Any]:
    env: dict[str, str] = {}
    secrets: dict[str, str] = {}
    for entry in box.parts("env"):
        name, value = entry.text("name") or "?", entry.text("value")
        source = entry.part("valueFrom")
        secret = source.part("secretKeyRef")
        if value is not None:
            env[name] = value
        elif secret.found:
            secrets[name] = f"{secret.text('name')}.{secret.text('key')}"
            source.note("secretKeyRef", f"nodes need a secret named {secrets[name]}")
        elif source.found:
            source.note("", f"has no equivalent; give {name} a value in `env`", needed=True)
        else:
            env[name] = ""
    return {key: value for key, value in (("env", env), ("secrets", secrets)) if value}


def resource_fields(resources: Keys) -> dict[str, Any]:
    """`resources` of a worker: requests, and limits where nothing is requested."""
    limits, requests = resources.part("limits"), resources.part("requests")
    found: dict[str, Any] = {}
    for section in (limits, requests):
        for name in list(section.found):
            text = section.text(name) or ""
            if GPUS.fullmatch(name):
                if (gpus := section.whole(name)) is not None:
                    found["gpus"] = gpus
            elif name == "cpu":
                found["cores"] = cores(text)
            elif name == "memory":
                found["host_memory"] = memory(text, bare_mib=2**-20)
            else:
                section.note(name, "has no equivalent; left out", needed="gpu" in name or "mig" in name)
    resources.rest({"claims": "write `gpus` and `gpu_models`"})
    given = {name: value for name, value in found.items() if value is not None}
    given.setdefault("gpus", 0)
    return {"resources": given}


def batch_job(spec: Keys) -> dict[str, Any]:
    """A Job of `batch/v1`, which others have as a template."""
    found = _template(spec)
    found |= _limits(spec, found)
    together, all_of_them = spec.whole("parallelism") or 1, spec.whole("completions")
    if together > 1:
        found["workers"] = together
        spec.note(
            "parallelism", "its pods are the workers of one job here: they start together or not at all"
        )
    if all_of_them is not None and all_of_them != together:
        spec.note("completions", "has no equivalent; submit a job for each", needed=True)
    spec.rest(
        {
            **RUN_POLICY,
            "completionMode": "RANK is each worker's index, in place of JOB_COMPLETION_INDEX",
            "backoffLimitPerIndex": "`retry` is for the whole job",
            "maxFailedIndexes": "`retry` is for the whole job",
            "podFailurePolicy": "`retry` is for failures; a job whose node is lost queues again in any case",
            "successPolicy": "a job succeeds when all of its workers have",
        }
    )
    return found


def cron_job(spec: Keys) -> dict[str, Any]:
    """The Job of a CronJob, once."""
    template = spec.part("jobTemplate")
    template.ignore("metadata")
    found = batch_job(template.part("spec"))
    template.rest({})
    spec.ignore("successfulJobsHistoryLimit", "failedJobsHistoryLimit", "startingDeadlineSeconds")
    spec.rest(
        dict.fromkeys(("schedule", "timeZone", "concurrencyPolicy", "suspend"), "submit from a cron job")
    )
    return found


def volcano_job(spec: Keys) -> dict[str, Any]:
    """A gang of Volcano: its tasks are roles."""
    counts: dict[str, int] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for task in spec.parts("tasks"):
        role = _role(task, counts)
        counts[role], shapes[role] = _replicas(task), _template(task)
        task.rest({"policies": VOLCANO["policies"], "minAvailable": GANG})
    found = _gang(spec, counts, shapes) | spec.retries("maxRetry")
    spec.ignore("ttlSecondsAfterFinished")
    spec.rest(VOLCANO)
    return found


def _role(part: Keys, taken: Mapping[str, int]) -> str:
    """The name of a role among others; servers of parameters are called so in any letters."""
    name = part.text("name") or f"task-{len(taken)}"
    return SERVERS if name.upper() == SERVERS else name


def _replicas(part: Keys) -> int:
    replicas = part.whole("replicas")
    return 1 if replicas is None else replicas


def job_set(spec: Keys) -> dict[str, Any]:
    """A JobSet: all pods of its jobs are one gang."""
    counts: dict[str, int] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for job in spec.parts("replicatedJobs"):
        role, replicas = _role(job, counts), _replicas(job)
        template = job.part("template")
        template.ignore("metadata")
        shapes[role] = batch_job(template.part("spec"))
        template.rest({})
        counts[role] = replicas * shapes[role].pop("workers", 1)
        job.rest({"dependsOn": GANG})
    found = _gang(spec, counts, shapes)
    failures = spec.part("failurePolicy")
    found |= failures.retries("maxRestarts")
    failures.rest({"rules": VOLCANO["policies"]})
    spec.rest(
        {
            **RUN_POLICY,
            "successPolicy": "a job succeeds when all of its workers have",
            "startupPolicy": GANG,
            "network": "workers reach each other by MASTER_ADDR and MASTER_PORT",
            "coordinator": "rank 0 is at MASTER_ADDR",
        }
    )
    return found


def train_job(spec: Keys) -> dict[str, Any]:
    """A TrainJob of Kubeflow's second trainer."""
    trainer = spec.part("trainer")
    box = {name: trainer.take(name) for name in ("image", "command", "args", "env")}
    box["resources"] = trainer.take("resourcesPerNode")
    given = {name: value for name, value in box.items() if value is not None}
    found = container_fields(Keys(given, trainer.path, trainer.notes))
    if (nodes := trainer.whole("numNodes")) is not None and nodes > 1:
        found["workers"] = nodes
    trainer.rest({"numProcPerNode": "a worker is one process; start more by torchrun in the command"})
    spec.ignore("managedBy")
    spec.rest(
        {
            **RUN_POLICY,
            "runtimeRef": "name its image by `environment: {container: IMAGE}`, and write its command",
            "initializer": "fetch models and data in the script",
            "podTemplateOverrides": NODES,
        }
    )
    return found


def _limits(spec: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    """Limits that Jobs and Kubeflow's run policies have in common."""
    more = spec.seconds("activeDeadlineSeconds", "run_timeout") | spec.retries("backoffLimit")
    if "retry" in found and "retry" not in more:
        spec.note("backoffLimit", f"is missing; retry.max_attempts has a limit, {UNLIMITED_RETRIES}")
    spec.ignore(
        "ttlSecondsAfterFinished",
        "cleanPodPolicy",
        "manualSelector",
        "selector",
        "managedBy",
        "podReplacementPolicy",
    )
    return more


def _template(holder: Keys) -> dict[str, Any]:
    """Fields by a pod's template."""
    template = holder.part("template")
    template.ignore("metadata")
    found = pod_fields(template.part("spec"))
    template.rest({})
    return found


def kubeflow(kind: str, spec: Keys) -> dict[str, Any]:
    """A gang of one role, of a master and workers, or of workers and parameter servers."""
    roles = spec.part(ROLES[kind])
    counts: dict[str, int] = {}
    shapes: dict[str, dict[str, Any]] = {}
    for role in list(roles.found):
        one = roles.part(role)
        policy = one.text("restartPolicy")
        counts[role], shapes[role] = _replicas(one), _template(one)
        if policy in ("OnFailure", "Always", "ExitCode"):
            shapes[role]["retry"] = {"max_attempts": UNLIMITED_RETRIES}
        one.rest({})
    if kind == "MPIJob":
        roles.note(
            "Launcher", "mpirun starts processes by itself; write the command of one worker", needed=True
        )
        counts.pop("Launcher", None)
    if counts.pop("Evaluator", 0):
        roles.note(
            "Evaluator", "has no equivalent; evaluate in a worker, or in a job of its own", needed=True
        )
    found = _gang(roles, counts, shapes)
    policy_part = spec.part("runPolicy")
    found |= _limits(policy_part, found)
    policy_part.rest(RUN_POLICY)
    spec.rest(
        {
            "elasticPolicy": "`workers: {min: …, max: …}` with `global_batch_size` is the range of an "
            "elastic job",
            "nprocPerNode": "a worker is one process; start more by torchrun in the command",
            "slotsPerWorker": "a worker is one process",
        }
    )
    return found


def _gang(roles: Keys, counts: dict[str, int], shapes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Workers, and what each is; the role with the most replicas speaks for all."""
    servers = counts.pop(SERVERS, 0)
    workers = {role: count for role, count in counts.items() if count}
    if not workers:
        roles.note("", "has no role with workers", needed=True)
        return {}
    speaker = max(workers, key=lambda role: (workers[role], role != "Master"))
    found = dict(shapes[speaker])
    for role in workers:
        for name in sorted({*shapes[role], *found}):
            if shapes[role].get(name) != found.get(name):
                text = f"{name} differs from {speaker}'s; all workers of a job are alike: {speaker}'s counts"
                roles.note(role, text, needed=name == "command")
    found["workers"] = sum(workers.values())
    if servers:
        found["parameter_servers"] = servers
        roles.note(SERVERS, "runs the workers' command, with PENSTOCK_ROLE=ps; its resources are estimated")
    return found


CONVERTERS: Mapping[str, Callable[[Keys], dict[str, Any]]] = MappingProxyType(
    {
        "Pod": pod_fields,
        "Job": batch_job,
        "CronJob": cron_job,
        "JobSet": job_set,
        "TrainJob": train_job,
        **{kind: partial(kubeflow, kind) for kind in ROLES},
    }
)
"""Kind → the job file's fields by its specification."""


def manifest_kind(found: Mapping[str, Any]) -> str:
    """The kind of a Kubernetes object; empty: it is none."""
    return str(found.get("kind", "")) if "apiVersion" in found and "kind" in found else ""


def convert(found: Mapping[str, Any], kind: str) -> Imported:
    notes: Notes = []
    manifest = Keys(found, "", notes)
    manifest.ignore(*KIND_ALONE)
    of_volcano = kind == "Job" and str(found["apiVersion"]).startswith(VOLCANO_GROUP)
    converter = volcano_job if of_volcano else CONVERTERS[kind]
    fields = named(manifest.part("metadata")) | converter(manifest.part("spec"))
    manifest.rest({})
    return Imported(f"a {kind} of Kubernetes", [fields], notes)
