"""Argo's workflows as job files: one job per step that runs a container; the order of steps is named,
since jobs have none."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.imports.keys import Imported, Keys, Note, Notes
from penstock.imports.kubernetes import KIND_ALONE, container_fields, named

KINDS = ("Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow")
EXPRESSION = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")
MAX_STEPS = 100
MAX_DEPTH = 10  # of templates that call templates
ORDER = "jobs have no order of their own; submit the next one after `penstock wait JOB`"
WORKFLOW: Mapping[str, str] = {
    "onExit": "run it after `penstock wait JOB`",
    "volumes": "folders of the nodes are seen under their own paths (`workdir`)",
    "volumeClaimTemplates": "folders of the nodes are seen under their own paths (`workdir`)",
    "nodeSelector": "write `gpu_models` for a GPU model, `nodes` for labels of nodes",
    "tolerations": "Penstock chooses the nodes",
    "parallelism": "the queue decides",
    "serviceAccountName": "a job has no identity of the cluster; give `secrets`",
    "artifactRepositoryRef": "write to a folder that the nodes share",
    "hooks": "follow `penstock events --follow`",
    "schedule": "submit from a cron job",
    "schedules": "submit from a cron job",
    "workflowTemplateRef": "import the template's own file",
}
STEP: Mapping[str, str] = {
    "when": "submit the job only where the condition holds",
    "withItems": "submit a job for each item",
    "withParam": "submit a job for each item",
    "withSequence": "submit a job for each number",
    "templateRef": "import the template's own file",
    "continueOn": "`penstock wait` tells each outcome",
}
TEMPLATE: Mapping[str, str] = {
    "outputs": "write to a folder that the nodes share",
    "sidecars": "start their programs in the script",
    "initContainers": "begin the script with their commands (`command: |`)",
    "nodeSelector": "write `gpu_models` for a GPU model, `nodes` for labels of nodes",
    "volumes": "folders of the nodes are seen under their own paths (`workdir`)",
    "tolerations": "Penstock chooses the nodes",
    "memoize": "jobs have no cache of results",
    "synchronization": "the queue decides",
}
OTHER_KINDS = ("resource", "suspend", "http", "plugin", "containerSet", "data")
"""Templates that run no program of the user's."""


class Workflow:
    """One workflow while it is converted."""

    def __init__(self, spec: Keys, notes: Notes) -> None:
        self.notes = notes
        self.jobs: list[dict[str, Any]] = []
        self.called: set[str] = set()
        self.templates = {one.text("name") or "": one for one in spec.parts("templates")}
        arguments = spec.part("arguments")
        self.given = {f"workflow.parameters.{name}": value for name, value in _parameters(arguments).items()}
        arguments.rest({"artifacts": "write to a folder that the nodes share"})

    def programs(self) -> list[str | None]:
        """Templates that run a program by themselves."""
        return [name for name, one in self.templates.items() if "container" in one or "script" in one]

    def run(self, name: str, called: str, values: Mapping[str, str], depth: int = 0) -> None:
        """Jobs of a template. `called`: the path of its call; `values`: expression → text."""
        template = self.templates.get(name)
        self.called.add(name)
        if template is None or depth > MAX_DEPTH or len(self.jobs) >= MAX_STEPS:
            problem = (
                "no such template in this file"
                if template is None
                else "is nested too deeply, or has too many steps"
            )
            Keys({}, called, self.notes).note("", f"{name}: {problem}", needed=True)
            return
        own = Keys(template.found, template.path, self.notes)
        inputs = own.part("inputs")
        defaults = {f"inputs.parameters.{key}": text for key, text in _parameters(inputs).items()}
        inputs.rest({"artifacts": "read from a folder that the nodes share, or give `sync`"})
        values = {**self.given, **defaults, **values}
        if own.take("container") is not None:
            fields = container_fields(own.part("container"))
            self._add(own, name, fields, values)
        elif own.take("script") is not None:
            self._add(own, name, self._script(own.part("script")), values)
        for group in own.take("steps") or []:
            for step in group if isinstance(group, list) else [group]:
                self._call(Keys(step, own.at("steps"), self.notes), values, depth)
        graph = own.part("dag")
        for task in graph.parts("tasks"):
            self._call(task, values, depth)
        graph.rest({})
        for kind in OTHER_KINDS:
            if own.take(kind) is not None:
                own.note(kind, "has no equivalent; it runs no program of yours")
        own.ignore(
            "name", "metadata", "podSpecPatch", "retryStrategy", "activeDeadlineSeconds", "steps", "dag"
        )
        own.rest(TEMPLATE)

    def _script(self, script: Keys) -> dict[str, Any]:
        """A container whose command is the script's interpreter with its text."""
        source, interpreter = script.text("source") or "", script.texts("command") or ["bash"]
        others = {name: value for name, value in script.found.items() if name != "source"}
        whole = others | {"command": [*interpreter, "-c", source]}
        return container_fields(Keys(whole, script.path, self.notes))

    def _call(self, step: Keys, values: Mapping[str, str], depth: int) -> None:
        name, template = step.text("name") or "?", step.text("template")
        if step.take("dependencies") or step.take("depends"):
            step.note("dependencies", ORDER)
        arguments = _filled_texts(_parameters(step.part("arguments")), values)
        inner = {f"inputs.parameters.{key}": text for key, text in arguments.items()}
        step.ignore("arguments")
        if "inline" in step:
            template = f"{step.path}.{name}"
            self.templates[template] = step.part("inline")
        step.rest(STEP, needed=frozenset(STEP))
        if template is not None:
            before = len(self.jobs)
            self.run(template, f"{step.path}.{name}", inner, depth + 1)
            if len(self.jobs) == before + 1:
                self.jobs[before]["name"] = name

    def _add(self, own: Keys, name: str, fields: dict[str, Any], values: Mapping[str, str]) -> None:
        limits = own.part("retryStrategy").retries("limit") | own.seconds(
            "activeDeadlineSeconds", "run_timeout"
        )
        self.jobs.append({"name": name, **filled(fields | limits, values)})


def _parameters(arguments: Keys) -> dict[str, str]:
    found = {}
    for one in arguments.parts("parameters"):
        name, value = one.text("name") or "?", one.text("value")
        default = one.text("default")
        if (text := value if value is not None else default) is not None:
            found[name] = text
        one.ignore("description", "enum", "globalName")
        one.rest({"valueFrom": "give its value"})
    return found


def _filled_texts(texts: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    return {name: str(filled(text, values)) for name, text in texts.items()}


def filled(found: Any, values: Mapping[str, str]) -> Any:
    """The same with `{{inputs.parameters.x}}` and the like in place; expressions that are not known stay."""
    if isinstance(found, str):
        return EXPRESSION.sub(lambda match: values.get(match[1], match[0]), found)
    if isinstance(found, dict):
        return {name: filled(value, values) for name, value in found.items()}
    return [filled(value, values) for value in found] if isinstance(found, list) else found


def convert(found: Mapping[str, Any], kind: str) -> Imported:
    notes: Notes = []
    manifest = Keys(found, "", notes)
    manifest.ignore(*KIND_ALONE)
    meta = named(manifest.part("metadata"))
    spec = manifest.part("spec")
    if kind == "CronWorkflow":
        inner = spec.part("workflowSpec")
        spec.rest(WORKFLOW)
        spec = inner
    workflow = Workflow(spec, notes)
    entries = [spec.text("entrypoint")] if "entrypoint" in spec else workflow.programs()
    limits = spec.seconds("activeDeadlineSeconds", "run_timeout") | spec.part("retryStrategy").retries(
        "limit"
    )
    workflow.given["workflow.name"] = str(meta.get("name", ""))
    for entry in entries:
        workflow.run(entry or "", "spec.entrypoint", {})
    if "entrypoint" not in spec:
        spec.note(
            "entrypoint",
            f"is missing; {len(entries)} templates that run a program are jobs",
            needed=not entries,
        )
    for name, template in workflow.templates.items():
        if name not in workflow.called:
            spec.notes.append(Note(template.path, f"{name} is called by nothing in this file; left out"))
    for job in workflow.jobs:
        for name, value in limits.items():
            job.setdefault(name, value)
        if "labels" in meta:
            job["labels"] = meta["labels"]
    if len(workflow.jobs) == 1 and meta.get("name"):
        workflow.jobs[0]["name"] = meta["name"]
    elif len(workflow.jobs) > 1:
        spec.note("templates", f"{len(workflow.jobs)} jobs; {ORDER}")
    spec.ignore(
        "templates", "ttlStrategy", "podGC", "archiveLogs", "templateDefaults", "arguments", "podMetadata"
    )
    spec.rest(WORKFLOW, needed=frozenset(("workflowTemplateRef",)))
    manifest.rest({})
    return Imported(f"a {kind} of Argo", workflow.jobs, notes)
