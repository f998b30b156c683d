"""Determined's experiments as job files: one trial of an entry point that is a command."""

import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.imports.keys import Imported, Keys, Notes
from penstock.imports.shell import adapted
from penstock.model.nouns.types import MAX_GPUS_PER_NODE

EXPERIMENT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("workspace", "project", "description", "labels", "tags"), "write `labels`"),
        **dict.fromkeys(
            ("checkpoint_storage", "checkpoint_policy"),
            "`checkpoint: sdk` saves in a folder of the node (sdk/README.md)",
        ),
        **dict.fromkeys(
            ("bind_mounts", "data_layer", "tensorboard_storage"),
            "nodes read folders that they share (`workdir`)",
        ),
        **dict.fromkeys(
            (
                "min_validation_period",
                "min_checkpoint_period",
                "records_per_epoch",
                "scheduling_unit",
                "perform_initial_validation",
            ),
            "the script decides; the harness of Determined is not there",
        ),
        "hyperparameters": "give them as arguments of the command",
        "data": "give it as arguments of the command",
        "reproducibility": "give the seed as an argument of the command",
        "optimizations": "the script decides; the harness of Determined is not there",
        "profiling": "`penstock top` shows use and step times",
        "integrations": "the script decides; the harness of Determined is not there",
        "debug": "`penstock logs` has the output",
        "log_policies": "`penstock logs` has the output",
        "preemption_timeout": "`grace` is the time between SIGTERM and SIGKILL",
    }
)
RESOURCES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("resource_pool", "agent_label", "weight", "max_slots", "native_parallel", "is_single_node"),
            "the queue and the tenants' shares decide",
        ),
        "shm_size": "/dev/shm is the task's own, and may use all of its memory",
        "devices": "a job has its own GPUs alone",
    }
)
LEGACY = re.compile(r"[\w.]+:\w+")
"""`model_def:Trial`, a class for Determined's own harness."""
HARNESS = re.compile(r"\bdetermined\.launch\b|\bdeterminedexec\b")


def is_experiment(found: Mapping[str, Any]) -> bool:
    return "searcher" in found and ("entrypoint" in found or "hyperparameters" in found)


def convert(found: Mapping[str, Any]) -> Imported:
    notes: Notes = []
    experiment = Keys(found, "", notes)
    fields: dict[str, Any] = {}
    fields |= experiment.same("name", "name")
    fields |= _resources(experiment.part("resources"))
    fields |= experiment.retries("max_restarts")
    fields |= _environment(experiment.part("environment"))
    fields["sync"] = "."
    _searcher(experiment.part("searcher"), fields)
    entry = experiment.take("entrypoint")
    words = [str(word) for word in entry] if isinstance(entry, list) else None
    text = entry if isinstance(entry, str) else shlex.join(words or [])
    if not text.strip():
        experiment.note("entrypoint", "is missing; there is nothing to run", needed=True)
    elif LEGACY.fullmatch(text.strip()) or HARNESS.search(text):
        experiment.note(
            "entrypoint",
            "runs by Determined's own harness, which is not there; write the command of a script",
            needed=True,
        )
    elif words:
        fields["command"] = words
    else:
        fields["script"] = adapted(text.rstrip("\n") + "\n", "entrypoint", notes)
    hyperparameters = experiment.part("hyperparameters")
    hyperparameters.rest(dict.fromkeys(hyperparameters.found, "give it as an argument of the command"))
    experiment.rest(EXPERIMENT)
    return Imported("an experiment of Determined", [fields], notes)


def _resources(resources: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    slots = resources.whole("slots_per_trial")
    gpus = 1 if slots is None else slots
    if gpus > MAX_GPUS_PER_NODE:
        found["workers"] = -(-gpus // 8)
        resources.note(
            "slots_per_trial", f"{gpus} GPUs are {found['workers']} workers with 8 each", needed=gpus % 8 > 0
        )
        gpus = 8
    resources.own_priority()
    if resources.take("slots") is not None:
        resources.note("slots", "is for commands and shells; left out")
    resources.rest(RESOURCES)
    return {**found, "resources": {"gpus": gpus}}


def _environment(environment: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    image = environment.take("image")
    if isinstance(image, Mapping):
        image = image.get("cuda") or image.get("gpu") or image.get("cpu")
    if isinstance(image, str):
        found["environment"] = {"container": image}
    variables = environment.take("environment_variables")
    if isinstance(variables, Mapping):
        lists = [part if isinstance(part, list) else [part] for part in variables.values()]
        variables = [entry for part in lists for entry in part]
    found |= Keys({"environment_variables": variables}, environment.path, environment.notes).assignments(
        "environment_variables"
    )
    environment.rest(
        {
            "force_pull_image": "pull it on the nodes",
            "registry_auth": "log in to the registry on the nodes",
            "pod_spec": "Penstock chooses the nodes",
            "ports": "workers reach each other by MASTER_ADDR and MASTER_PORT",
            "proxy_ports": "jobs have no ports",
        }
    )
    return found


def _searcher(searcher: Keys, fields: dict[str, Any]) -> None:
    name = searcher.text("name")
    if name not in (None, "single"):
        searcher.note("name", f"{name} has no equivalent; submit a job for each trial", needed=True)
    length = searcher.take("max_length")
    batches = length.get("batches") if isinstance(length, Mapping) else None
    if isinstance(batches, int):
        fields["iterations"] = batches
    elif length is not None:
        searcher.note("max_length", "has no equivalent in epochs or records; write `iterations`")
    searcher.ignore(
        "smaller_is_better", "source_trial_id" if searcher.found.get("source_trial_id") is None else ""
    )
    searcher.rest(
        {
            "metric": "report losses by the SDK (progress); `target_loss` ends the job",
            "source_checkpoint_uuid": "give the checkpoint as an argument of the command",
            "max_trials": "submit a job for each trial",
        }
    )
