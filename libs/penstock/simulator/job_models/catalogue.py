"""Registry of job models by name, each built for one trace. Source data are read here, so that the models are
pure.

Some job models bring work of their own and stand alone (`WORKS`, and those of installed packages); all others
compute speeds and can wrap each other (`MODELS`). Data of a job model that a trace lacks are reported before
anything runs, each job with its line.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock.entry_points import Group
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.files.csv_import import BadFile, Problem
from penstock.scheduling.profiles import profile_for
from penstock.simulator.job_models.expression import UnknownJobModel as UnknownJobModel
from penstock.simulator.job_models.expression import Wanted, parse
from penstock.simulator.job_models.measurements import tables
from penstock.simulator.job_models.measurements.colocation import Colocation
from penstock.simulator.job_models.measurements.convergence import Convergence
from penstock.simulator.job_models.measurements.cores import PARALLEL, Cpu
from penstock.simulator.job_models.measurements.measured import read_model
from penstock.simulator.job_models.measurements.measured_restarts import MeasuredPhases, measured_costs
from penstock.simulator.job_models.measurements.placement_table import Model, TableWork
from penstock.simulator.job_models.measurements.steps import StageTimes, StepTimes
from penstock.simulator.job_models.measurements.tables import STAGE_PROFILES
from penstock.simulator.job_models.model import Constant, JobModel, NotMeasured, Work
from penstock.simulator.job_models.restarts import CostOf, RestartingWork
from penstock.simulator.job_models.sharing import (
    LAUNCH_S,
    SAVE_S,
    Bandwidth,
    Links,
    Phases,
    SharedNode,
)
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.job_models.turns import Turns
from penstock.simulator.traces.cluster import UNKNOWN_GPU
from penstock.simulator.traces.files.importing import Trace, data_path, data_root
from penstock.simulator.traces.jobs import TraceJob

MEASURED = "pollux/traces"
GAVEL, SYNERGY = "gavel", "synergy"
DEFAULT_GPU = "v100"  # of nodes without a GPU model: the newest that Gavel measured
MOST_S = 86_400.0
LOSS_EVERY_S = 5.0  # between two losses of a training script, if a service reads them


class Run(NamedTuple):
    """Properties of the run that job models need."""

    gpus_per_node: int = 8
    tick_s: float = 0.0
    nodes: Sequence[NodeSpec] = ()
    slices_per_core: int = 1
    """Nodes' units per core."""
    cost_of: CostOf | None = None
    """Cost of a job's restarts; None: restarts are free."""


class Asked(NamedTuple):
    """Arguments for building a job model: trace, settings, run, and its own options."""

    trace: Trace
    path: Path
    settings: PlacerSettings
    run: Run
    wanted: Wanted

    def number(self, option: str, default: float) -> float:
        """An option in seconds. Raises `UnknownJobModel`."""
        return self._between(option, default, MOST_S, f"{MOST_S:,.0f} seconds")

    def share(self, option: str, default: float) -> float:
        """An option from 0 to 1. Raises `UnknownJobModel`."""
        return self._between(option, default, 1.0, "1")

    def _between(self, option: str, default: float, most: float, most_text: str) -> float:
        text = self.wanted.options.get(option)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise UnknownJobModel(f"job model {self.wanted.name}: {option}={text}: between 0 and {most_text}")
        return value

    def choice(self, option: str, default: str, known: Sequence[str]) -> str:
        """Raises `UnknownJobModel`."""
        text = self.wanted.options.get(option, default)
        if text not in known:
            raise UnknownJobModel(
                f"job model {self.wanted.name}: {option}={text}: there are {', '.join(sorted(known))}"
            )
        return text

    def data(self, where: str) -> Path:
        """A path below the data folder. Raises `BadFile` if it does not exist."""
        return data_path(where, f"job model {self.wanted.name}", str(self.path))


def start_up_of(path: Path) -> dict[tuple[str, int], float]:
    """(model, GPUs) → seconds of a start-up, from `stage_profiles.csv` beside the trace, above it or in the
    data. Raises `BadFile` without one."""
    root = data_root()
    places = [path.parent / STAGE_PROFILES, path.parent.parent / STAGE_PROFILES]
    if root is not None:
        places.append(root / "muri" / STAGE_PROFILES)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise BadFile(str(path), [Problem(0, "", f"job model muri needs {STAGE_PROFILES} beside the trace")])
    return tables.read_start_ups(found)


def _table(asked: Asked) -> Work:
    return TableWork(_pollux(asked), asked.run.gpus_per_node, asked.run.tick_s)


def _pollux(asked: Asked) -> Mapping[str, Model]:
    """Pollux's measurements of the trace's models, from the data sets."""
    folder, trace = asked.data(MEASURED), asked.trace
    known = {place.name for place in folder.iterdir() if place.is_dir()}
    problems: list[Problem] = []
    for job in trace.jobs:
        if job.model not in known:
            message = (
                f"{job.model} was not measured"
                if job.model
                else f"job model {asked.wanted.name} needs a model"
            )
            problems.append(trace.problem(job, "model", f"{message}; there are {', '.join(sorted(known))}"))
        if job.batch_size is None:
            problems.append(trace.problem(job, "batch_size", f"job model {asked.wanted.name} needs it"))
    if problems:
        raise BadFile(str(asked.path), problems)
    return {name: read_model(folder / name) for name in sorted({job.model for job in trace.jobs})}


def _step_times(asked: Asked) -> JobModel:
    without = [job for job in asked.trace.jobs if job.iterations is None]
    if without:
        problems = [
            asked.trace.problem(job, "iterations", "job model step-times needs them") for job in without
        ]
        raise BadFile(str(asked.path), problems)
    return StepTimes(_pollux(asked), asked.run.gpus_per_node)


def _colocation(asked: Asked) -> JobModel:
    table = tables.read_throughputs(asked.data(GAVEL))
    gpu = asked.choice("gpu", DEFAULT_GPU, sorted(table.gpu_types))
    split = asked.choice("unmeasured", "refuse", ("refuse", "split")) == "split"
    gpu_of = {
        node.node_id: node.gpus[0].model.lower()
        for node in asked.run.nodes
        if node.gpus and node.gpus[0].model != UNKNOWN_GPU
    }
    return Colocation(table, gpu, gpu_of, asked.run.gpus_per_node, split=split)


def _cpu(asked: Asked) -> JobModel:
    table = tables.read_sensitivity(asked.data(SYNERGY) / tables.SENSITIVITY)
    return Cpu(table, asked.run.slices_per_core, asked.share("parallel", PARALLEL))


def _bandwidth(asked: Asked, inner: JobModel) -> JobModel:
    return Bandwidth(inner, asked.run.slices_per_core)


def _convergence(asked: Asked, inner: JobModel) -> JobModel:
    return Convergence(inner, tables.read_curves(asked.data("charrnn").parent))


def _phases(asked: Asked, inner: JobModel) -> JobModel:
    return Phases(inner, asked.number("launch_s", LAUNCH_S), asked.number("save_s", SAVE_S))


def _measured_phases(asked: Asked, inner: JobModel) -> JobModel:
    return MeasuredPhases(inner, measured_costs(start_up_of(asked.path)))


class Kind(NamedTuple):
    """Constructor of a job model; `around`: the default inner model of a wrapper."""

    make: Callable[..., JobModel]
    options: Sequence[str] = ()
    around: str = ""


WORKS: Mapping[str, Callable[[Asked], Work]] = MappingProxyType({"placement-table": _table})
INSTALLED: Group[Callable[[Asked], Work]] = Group("penstock.job_models")
"""Job models with work of their own that installed packages add."""
MODELS: Mapping[str, Kind] = MappingProxyType(
    {
        "constant": Kind(lambda asked: Constant()),
        "colocation": Kind(_colocation, ("gpu", "unmeasured")),
        "cpu": Kind(_cpu, ("parallel",)),
        "stages": Kind(lambda asked: StageTimes()),
        "step-times": Kind(_step_times),
        "bandwidth": Kind(_bandwidth, around="cpu"),
        "convergence": Kind(_convergence, around="constant"),
        "links": Kind(lambda asked, inner: Links(inner), around="stages"),
        "turns": Kind(lambda asked, inner: Turns(inner), around="constant"),
        "measured-phases": Kind(_measured_phases, around="constant"),
        "phases": Kind(_phases, ("launch_s", "save_s"), "constant"),
        "shared-node": Kind(lambda asked, inner: SharedNode(inner), around="constant"),
    }
)
ALONE = Kind(lambda asked: Constant())
"""The form of an expression with a job model that brings its own work: no options, no inner model."""


def job_models() -> list[str]:
    """All names: first those that bring their own work."""
    return [*sorted({*WORKS, *INSTALLED.names()}), *MODELS]


def _alone(name: str) -> Callable[[Asked], Work] | None:
    """The job model of this name, if it brings its own work."""
    return WORKS.get(name) or INSTALLED.get(name)


def checked_job_model(text: str) -> Wanted:
    """Parses the expression and checks its names and options. Raises `UnknownJobModel`."""
    wanted = parse(text)
    at: Wanted | None = wanted
    while at is not None:
        alone = _alone(at.name) is not None
        if alone and at is not wanted:
            raise UnknownJobModel(f"job model {at.name} brings its own work: nothing can stand around it")
        kind = ALONE if alone else MODELS.get(at.name)
        if kind is None:
            raise UnknownJobModel(
                f"{at.name!r} is not a job model; there are {', '.join(sorted(job_models()))}"
            )
        if at.inner is not None and not kind.around:
            raise UnknownJobModel(f"job model {at.name} stands around no other: leave out {at.inner.name}")
        if unknown := sorted(set(at.options) - set(kind.options)):
            there = f"there are {', '.join(kind.options)}" if kind.options else "it has none"
            raise UnknownJobModel(f"job model {at.name}: no option {', '.join(unknown)}; {there}")
        at = at.inner
    return wanted


def work_for(
    job_model: str,
    trace: Trace,
    path: Path,
    settings: PlacerSettings,
    run: Run = Run(),  # noqa: B008
) -> Work:
    """The work of a run. Raises `UnknownJobModel`, or `BadFile` if the trace lacks data of the job model."""
    wanted = checked_job_model(job_model)
    asked = Asked(trace, path, settings, run, wanted)
    alone = _alone(wanted.name)
    if alone is not None:
        moldable = [job for job in trace.jobs if job.min_workers is not None]
        if moldable:
            problems = [trace.problem(job, "min_workers", one_shape(wanted.name)) for job in moldable]
            raise BadFile(str(path), problems)
        if run.cost_of is not None:
            raise UnknownJobModel(
                f"job model {wanted.name} has restart costs of its own: leave out --restart-cost, or take "
                "another"
            )
        return alone(asked)
    model = _model(asked)
    _validate(model, asked)
    profile = profile_for(settings)
    loss_every_s = inf if profile.migrate is None else LOSS_EVERY_S
    watched = profile.guard is not None
    if run.cost_of is not None:
        return RestartingWork(model, run.cost_of, loss_every_s, watched=watched)
    return SteadyWork(model, loss_every_s, watched=watched)


def _model(asked: Asked) -> JobModel:
    """The job model with its inner models. Raises `UnknownJobModel`, `BadFile`."""
    kind = MODELS[asked.wanted.name]
    if not kind.around:
        return kind.make(asked)
    return kind.make(asked, _model(asked._replace(wanted=asked.wanted.inner or parse(kind.around))))


def one_shape(name: str) -> str:
    return (
        f"job model {name} knows a job's run time in one shape only; take step-times, or leave the column out"
    )


def _validate_shapes(model: JobModel, job: TraceJob) -> None:
    """Raises `NotMeasured` for a moldable job whose run time in each of its shapes does not follow from
    measurements."""
    if not model.knows_shapes:
        raise NotMeasured(one_shape(model.name))
    assert job.min_workers is not None, job
    assert job.workers is not None, job
    for workers in range(job.min_workers, job.workers):
        model.work_s(job._replace(gpus=job.gpus // job.workers * workers, workers=workers))


def _validate(model: JobModel, asked: Asked) -> None:
    """Raises `BadFile` with every job that the job model has no measurement or run time for."""
    problems: list[Problem] = []
    for job in asked.trace.jobs:
        try:
            work_s = model.work_s(job)
            model.loss(job, 0.0)
            if job.min_workers is not None:
                _validate_shapes(model, job)
        except NotMeasured as error:
            problems.append(asked.trace.problem(job, "model", str(error)))
            continue
        if work_s <= 0:
            message = (
                f"job model {asked.wanted.name} needs run times; format {asked.trace.format} has none here"
            )
            problems.append(asked.trace.problem(job, "duration_s", message))
    if problems:
        raise BadFile(str(asked.path), problems)
