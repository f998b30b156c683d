"""Recognition of other schedulers' job files, and their conversion: the one door to the converters of this
package.

| kind | recognised by |
|---|---|
| Slurm | lines `#SBATCH` |
| SkyPilot | `run` or `setup`, beside `num_nodes`, `envs`, `accelerators` and the like |
| dstack | `type: task`, or another of dstack's types |
| Kubernetes | `apiVersion` and `kind`: Pod, Job (also of Volcano), CronJob, JobSet, Kubeflow's PyTorchJob,
TFJob, XGBoostJob, PaddleJob, JAXJob, MPIJob, TrainJob |
| Ray | `entrypoint` beside `runtime_env` and the like (API, Anyscale); the manifest RayJob |
| Argo | the manifests Workflow, WorkflowTemplate, CronWorkflow |
| Determined | `searcher` beside `entrypoint` or `hyperparameters` |
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import yaml

from penstock.errors import PenstockError
from penstock.imports import argo, determined, dstack, kubernetes, ray, skypilot, slurm
from penstock.imports.keys import Imported, Note, Notes
from penstock.sdk.job_file.job_yaml import JobLoader, problem_of
from penstock.sdk.job_file.jobfile import BadJob, parse_job

MAX_DOCUMENTS = 50
TEMPLATE = re.compile(r"\{\{[^{}]*\}\}|\$\{\{[^{}]*\}\}")
NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._:/-]+")
CONVERTIBLE = "SkyPilot, dstack, sbatch, PyTorchJob and other jobs of Kubernetes, Ray, Argo, Determined"


class NotConvertible(PenstockError):
    """The file is of no known kind, or cannot be read; the text names the place and the remedy."""


def kind_of(text: str, *, asked: bool = False) -> str | None:
    """The kind of another scheduler's file, such as `a SkyPilot file`; None: it is none, or cannot be
    read. `asked`: see `skypilot.is_task`."""
    if slurm.is_script(text):
        return "a script for sbatch"
    try:
        for document in _documents(text):
            if (found := _kind(document, asked=asked)) is not None:
                return found
    except yaml.YAMLError:
        return None
    return None


def _documents(text: str) -> Iterator[Mapping[str, Any]]:
    """The mappings of a file, JSON included. Raises `yaml.YAMLError`."""
    plain = text.removeprefix("\ufeff")
    if plain.lstrip()[:1] in ("{", "["):
        plain = plain.replace("\t", "  ")  # which JSON allows between its words
    for number, document in enumerate(yaml.load_all(plain, JobLoader)):
        if number >= MAX_DOCUMENTS:
            return
        if isinstance(document, list) or (isinstance(document, Mapping) and document.get("kind") == "List"):
            items = document.get("items") if isinstance(document, Mapping) else document
            yield from (one for one in items or [] if isinstance(one, Mapping))
        elif isinstance(document, Mapping):
            yield document


def _kind(found: Mapping[str, Any], *, asked: bool) -> str | None:
    if manifest := kubernetes.manifest_kind(found):
        return f"a {manifest} of Kubernetes"
    if "command" in found or "script" in found:
        return None
    if determined.is_experiment(found):
        return DETERMINED
    if found.get("type") in dstack.TYPES:
        return DSTACK
    if ray.is_job(found):
        return RAY
    return SKYPILOT if skypilot.is_task(found, asked=asked) else None


def convert(text: str, name: str) -> Imported:
    """The jobs of a file, each as the fields of a job file, and what has no equivalent. `name`: for jobs
    without a name. Raises `NotConvertible`."""
    if slurm.is_script(text):
        return _finished(slurm.convert(text, os.path.basename(name).rsplit(".", 1)[0]), name)
    if (mark := slurm.other_system(text)) is not None:
        raise NotConvertible(
            f"a script with {mark} lines is not converted; write them as flags of penstock submit"
        )
    try:
        documents = list(_documents(text))
    except yaml.MarkedYAMLError as error:
        mark_at = error.problem_mark
        where = f"line {mark_at.line + 1}, column {mark_at.column + 1}: " if mark_at else ""
        raise NotConvertible(f"{where}is not valid YAML: {problem_of(error)}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise NotConvertible("is neither YAML nor a script with #SBATCH lines") from error
    converted = [(document, _converted(document)) for document in documents]
    parts = [part for _, part in converted if part is not None]
    if not parts:
        known = any("command" in one or "script" in one for one in documents)
        if known:
            raise NotConvertible("is a job file of Penstock already: penstock submit -f FILE")
        raise NotConvertible(f"is of no known kind; files of {CONVERTIBLE} are converted")
    jobs = [job for part in parts for job in part.jobs]
    notes = [note for part in parts for note in part.notes]
    for document in (document for document, part in converted if part is None):
        notes += [Note(str(key), "stands in a document of no known kind; left out", True) for key in document]
    return _finished(Imported(parts[0].kind, jobs, notes), name)


def _converted(found: Mapping[str, Any]) -> Imported | None:
    """None: a document of no known kind."""
    manifest = kubernetes.manifest_kind(found)
    if manifest in argo.KINDS:
        return argo.convert(found, manifest)
    if manifest == "RayJob":
        return ray.convert_manifest(found)
    if manifest in kubernetes.CONVERTERS:
        return kubernetes.convert(found, manifest)
    if manifest:
        text = (
            f"{manifest} is not converted; Pods, Jobs, JobSets, Kubeflow's jobs, RayJobs and Argo's "
            "workflows are"
        )
        return Imported(f"a {manifest} of Kubernetes", [], [Note("kind", text, manifest not in HARMLESS)])
    kind = _kind(found, asked=True)
    if kind is not None:
        return CONVERTERS[kind](found)
    if found and found.keys() <= {"name", "execution"}:  # the head of SkyPilot's pipelines
        return Imported(SKYPILOT, [], [])
    return None


DETERMINED, DSTACK, RAY, SKYPILOT = (
    "an experiment of Determined",
    "a dstack file",
    "a job of Ray",
    "a SkyPilot file",
)
CONVERTERS: Mapping[str, Callable[[Mapping[str, Any]], Imported]] = MappingProxyType(
    {
        DETERMINED: determined.convert,
        DSTACK: dstack.convert,
        RAY: ray.convert,
        SKYPILOT: skypilot.convert,
    }
)
HARMLESS = frozenset(
    ("ConfigMap", "Secret", "Service", "Namespace", "PersistentVolumeClaim", "ServiceAccount")
)
"""Kinds that stand beside a job in its file."""


def _finished(found: Imported, name: str) -> Imported:
    """With valid names, and with a note for each template that nobody filled and each field that a job
    file refuses."""
    notes: Notes = list(found.notes)
    jobs = []
    for number, job in enumerate(found.jobs):
        at = f"job {job.get('name', number + 1)}: " if len(found.jobs) > 1 else ""
        stem = os.path.basename(name).rsplit(".", 1)[0]
        plain = NOT_IN_A_NAME.sub("-", str(job.get("name") or stem)).strip("._:/-")[:128] or "job"
        ordered = {"name": plain, **{key: value for key, value in job.items() if key != "name"}}
        for field, text in _texts(ordered, ""):
            if (template := TEMPLATE.search(text)) is not None:
                notes.append(Note(f"{at}{field}", f"{template[0][:48]} is a template; write its value", True))
        notes += [Note(f"{at}{problem.field}", problem.text, True) for problem in _problems(ordered)]
        jobs.append(ordered)
    return Imported(found.kind, jobs, notes)


def _problems(job: Mapping[str, Any]) -> Iterator[Any]:
    """What a job file would refuse; a folder to send counts as packed, a missing command has its own note."""
    fields = {key: value for key, value in job.items() if key != "sync"}
    if "command" not in fields and "script" not in fields:
        fields["command"] = ["true"]
    try:
        parse_job(fields)
    except BadJob as error:
        yield from error.problems


def _texts(found: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(found, str):
        yield path, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from _texts(value, f"{path}.{key}" if path else str(key))
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from _texts(value, f"{path}[{number}]")


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks."""


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text and not text.startswith((" ", "\t")) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)


def job_file(job: Mapping[str, Any]) -> str:
    """A job as the text of a job file."""
    return str(yaml.dump(dict(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))
