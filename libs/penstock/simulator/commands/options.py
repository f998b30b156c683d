"""Options of simulating commands and their validation: every mistake is found before anything runs."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console

from penstock.exits import BadCommand, Exit, Stop
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.validation import describe
from penstock.runtime.files.csv_import import MAX_SHOWN, BadFile, Problem
from penstock.scheduling import profiles
from penstock.scheduling.profiles import UnknownProfile, UnusedSetting, definition_of, own_names
from penstock.sdk.job_file.units import duration_ms
from penstock.simulator.assumptions import Variant, assumptions
from penstock.simulator.commands.restart_option import NONE, Restarts, grace_of, restarts_of
from penstock.simulator.engine import Durations, Options, Simulation
from penstock.simulator.generators.base import Generator
from penstock.simulator.generators.registry import EXAMPLE, generate, generator_of
from penstock.simulator.job_models.catalogue import (
    Run,
    UnknownJobModel,
    checked_job_model,
    job_models,
    work_for,
)
from penstock.simulator.job_models.model import Work
from penstock.simulator.nodes import Latency
from penstock.simulator.traces.arrivals import fill
from penstock.simulator.traces.cluster import NODE_SETS, BadCluster, Cluster, cluster_of, gpu_count
from penstock.simulator.traces.files.formats import FORMATS, OWN
from penstock.simulator.traces.files.importing import SETS, Trace, locate, passed_text, read_source
from penstock.simulator.traces.files.source import open_source
from penstock.simulator.traces.fitting import ClusterCapacity
from penstock.simulator.traces.resources import workers_of

CLUSTER, JOB_MODEL = "8x8", "constant"  # defaults
MAX_SECONDS = 86_400  # of latencies and ticks


@contextmanager
def bad_input_stops() -> Iterator[None]:
    """Wraps a whole command: problems of its input end it with a line each and exit code 2."""
    try:
        yield
    except (BadCluster, BadFile, UnknownProfile, UnusedSetting, UnknownJobModel) as error:
        raise BadCommand(str(error.args[0])) from error
    except KeyboardInterrupt as error:
        raise Stop(Exit.INTERRUPTED, "stopped before anything was finished") from error


def collect_rarely() -> None:
    """Makes garbage collections rare, as in a service: imported objects stay, and a run
    makes no cycles."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def seconds(text: str) -> float:
    """Seconds ≥ 0, from `60s`, `5m`, `1h30m` or plain seconds. Raises `BadParameter` with the remedy."""
    with suppress(ValueError):
        return float(text)
    try:
        return duration_ms(text) / 1_000
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Format = Literal["table", "json"]
Output = Annotated[Format, typer.Option("--output", "-o", help="A table, or JSON with fixed keys.")]
TraceName = Annotated[str, typer.Argument(help="A file, <data set>/<name>, or a generator.")]
Seed = Annotated[int, typer.Option(help="Seed of a generator.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines, and count them.")]
Columns = Annotated[
    str | None,
    typer.Option(
        metavar="OURS=THEIRS,…",
        help="Read a file as Penstock's CSV with other column names, as in "
        "submit_s=submit_time,gpus=num_gpu; "
        "duration_s=end_time-start_time where it has no run times.",
    ),
]


def renames_of(text: str | None) -> Mapping[str, str]:
    """Column of our own CSV → its name in the file. Raises `BadCommand`."""
    renames: dict[str, str] = {}
    for pair in text.split(",") if text is not None else ():
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not (ours and equals and theirs):
            raise BadCommand(f"--columns {pair}: write OURS=THEIRS, as in submit_s=submit_time")
        if ours not in OWN:
            raise BadCommand(f"--columns {pair}: our CSV has no column {ours}; there are {', '.join(OWN)}")
        if ours in renames or theirs in renames.values():
            raise BadCommand(f"--columns {pair}: {ours if ours in renames else theirs} comes twice")
        renames[ours] = theirs
    return renames


def time_option(help_text: str) -> Any:
    return typer.Option(parser=seconds, metavar="TIME", help=help_text)


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Options of every command that simulates: the trace, the cluster, the job model, and how to run."""

    trace: Annotated[
        str,
        typer.Argument(
            help=f"A file, <data set>/<name>: {', '.join(f'{name}/…' for name in SETS)}, or a generator such "
            "as "
            f"{EXAMPLE}; `penstock traces ls` lists them."
        ),
    ]
    cluster: Annotated[
        str | None,
        typer.Option(
            help="<nodes>x<GPUs per node>, as 4x8+2x4 (default 8x8, or a generator's own cluster); a CSV "
            "file with "
            "a line per node (node_id, cores, host_memory_mib, gpus, gpu_model); or a data set: "
            f"{', '.join(NODE_SETS)}."
        ),
    ] = None
    arrivals: Annotated[
        Literal["recorded", "fill"] | None,
        typer.Option(
            help="recorded: as in the trace; fill: in a seeded order, one a second and never ending, until "
            "they "
            "request 101 % of the GPUs (full_load_allocation shows how well they were packed). Default: fill "
            "for openb."
        ),
    ] = None
    job_model: Annotated[
        str | None,
        typer.Option(
            "--truth",
            help=f"Model of how fast jobs run: {', '.join(job_models())} (default constant, or a generator's "
            "own).",
        ),
    ] = None
    seed: Annotated[
        int, typer.Option(help="Seed of all random numbers: of the policy, a generator and the arrivals.")
    ] = 0
    set: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A placer setting; VALUE is JSON. May be repeated."),
    ] = None
    start_latency: Annotated[float, time_option("Start latency of each task.")] = 0.0
    stop_latency: Annotated[
        float, time_option("Time that a task takes to stop, after SIGTERM and saving.")
    ] = 0.0
    restart_cost: Annotated[
        str,
        typer.Option(
            metavar="none|measured|SAVE,LAUNCH,INTERVAL",
            help="Cost of stopping a job and starting it again, as 5s,20s,10m. A job saves before it stops, "
            "and launches again. If it is killed before it has saved, it loses its work since the last "
            "checkpoint. measured: it saves by the size of its model, and launches as Muri measured.",
        ),
    ] = NONE
    grace: Annotated[
        float | None,
        time_option(
            "Time between SIGTERM and SIGKILL. Default: 10 s, or the longest save if that is longer."
        ),
    ] = None
    single_gpu_workers: Annotated[
        bool,
        typer.Option("--single-gpu-workers", help="One worker per GPU, so that a job may spread over nodes."),
    ] = False
    prelaunch: Annotated[
        bool,
        typer.Option(
            "--prelaunch",
            help="Scripts wait for their GPUs where they begin to train: jobs may launch while others are "
            "about to end.",
        ),
    ] = False
    ticks: Annotated[
        float,
        time_option(
            "Interval at which the placer reads its inputs, as 60s, 5m or plain seconds; 0: at once."
        ),
    ] = 0.0
    estimator_time: Annotated[
        str,
        typer.Option(
            metavar="TIME|measured",
            help="Response time of the estimator, where run times are learned; a job waits for it. measured: "
            "the "
            "actual time on this machine, so that runs are not reproducible.",
        ),
    ] = "0s"
    batcher_time: Annotated[
        str,
        typer.Option(
            metavar="TIME|measured",
            help="Time that the batcher takes for a plan, under profiles for which it plans. measured: the "
            "actual time on this machine, "
            "so that runs are not reproducible.",
        ),
    ] = "0s"
    profile_noise: Annotated[
        float,
        typer.Option(
            metavar="0…1",
            help="Maximum relative error of the stage times that policies read, per model and batch size; "
            "the jobs themselves do not change.",
        ),
    ] = 0.0
    columns: Columns = None
    skip_bad: SkipBad = False
    check: Annotated[bool, typer.Option("--check", help="Check all invariants after every record.")] = False
    output: Output = "table"


@dataclass(frozen=True, slots=True)
class Given:
    """The validated command line; from here on only the profile and the seed vary."""

    asked: SimulationOptions
    cluster: Cluster
    options: Options
    job_model: str
    path: Path
    restarts: Restarts
    generator: Generator | None = None
    """Makes the trace, if it is not a file."""
    read: dict[Path, Trace] = field(default_factory=dict)
    """Cache of the trace in its file."""

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        return self.cluster.nodes

    def trace(self, seed: int) -> Trace:
        """The trace under this seed. Raises `BadCommand`, `BadFile`."""
        if self.generator is not None:
            return generate(self.asked.trace, self.generator, seed, self.capacity.problems)
        if self.path not in self.read:
            source = open_source(self.path, renames_of(self.asked.columns))
            fits = self.capacity.beyond if self._fills(source.name) else self.capacity.problems
            try:
                read = read_source(self.path, source, fits=fits, skip_bad=True)
            except BadFile as error:  # `no job is left` is reported only where bad lines may be left out
                lines = [problem for problem in error.problems if problem.line]
                raise error if self.asked.skip_bad or not lines else BadFile(str(self.path), lines) from None
            self.read[self.path] = self._without_bad_lines(read, seed)
        trace = self.read[self.path]
        if not self.fills(trace):
            return trace
        try:
            return trace._replace(jobs=fill(trace.jobs, gpu_count(self.nodes), seed))
        except ValueError as error:
            raise BadCommand(f"--arrivals fill: {error}") from error

    def _without_bad_lines(self, trace: Trace, seed: int) -> Trace:
        """The trace without its bad lines, if they may be left out; else raises `BadFile` with all of them.

        A line is bad by itself, because no node can hold its job, or because the job model has no measurement
        of it.
        """
        unknown: Sequence[Problem] = ()
        if not self.fills(trace):
            try:
                work_for(self.job_model, trace, self.path, PlacerSettings(), self._run(seed))
            except BadFile as error:
                unknown = error.problems
        problems = sorted([*trace.skipped, *unknown], key=lambda problem: problem.line)
        bad = {problem.line for problem in unknown}
        jobs = [job for job in trace.jobs if trace.lines[job.job_id] not in bad]
        if problems and (0 in bad or not jobs or not self.asked.skip_bad):
            raise BadFile(str(self.path), problems)
        return trace._replace(jobs=jobs, skipped=problems)

    @property
    def capacity(self) -> ClusterCapacity:
        return ClusterCapacity(self.nodes, self.cluster.slices_per_core, self.options.single_gpu_workers)

    def misfits(self, trace: Trace) -> int:
        """Number of jobs of the file that fit nowhere, where that is allowed because they fill the
        cluster."""
        if not self.fills(trace):
            return 0
        capacity = self.capacity
        return sum(1 for job in self.read[self.path].jobs if any(True for _ in capacity.problems(job)))

    def fills(self, trace: Trace) -> bool:
        """Whether its jobs fill the cluster and never end."""
        return self._fills(trace.format)

    def _fills(self, format_name: str) -> bool:
        arrivals = self.asked.arrivals
        form = FORMATS.get(format_name)
        return (form is not None and form.endless) if arrivals is None else arrivals == "fill"

    def seeded(self, trace: Trace) -> bool:
        """Whether the jobs or the nodes depend on the seed, beside the random numbers of policies."""
        return self.generator is not None or self.fills(trace) or self.cluster.ranked

    def settings(self, profile: str, seed: int) -> PlacerSettings:
        """Raises `BadCommand`, `UnknownProfile`, `UnusedSetting`."""
        return settings_of(profile, seed, self.asked.set or ())

    def _filled(self, settings: PlacerSettings, trace: Trace) -> PlacerSettings:
        """The settings with those that the profile takes from the trace where none are given."""
        definition = definition_of(settings.profile)
        if definition.fill is None:
            return settings
        jobs = self.read.get(self.path, trace).jobs  # each once, also where they fill the cluster
        most = max(len(node.gpus) for node in self.nodes)
        single = self.options.single_gpu_workers
        workers = workers_of(jobs, most, self.cluster.slices_per_core, single_gpu_workers=single)
        return definition.filled(settings, workers)

    def _run(self, seed: int) -> Run:
        most = max(len(node.gpus) for node in self.nodes)
        return Run(
            most,
            self.options.tick_s,
            self.cluster.under(seed),
            self.cluster.slices_per_core,
            cost_of=self.restarts.cost_of,
        )

    def work(self, seed: int, trace: Trace, settings: PlacerSettings) -> Work:
        """The work of the run, made by the job model. Raises `BadFile`, `UnknownJobModel`."""
        if self.fills(trace):
            return Work()
        return work_for(self.job_model, trace, self.path, settings, self._run(seed))

    def assumptions(self, variants: Sequence[Variant], trace: Trace) -> Mapping[str, str]:
        """Assumptions of all runs of these variants: key → sentence."""
        work = self.work(self.asked.seed, trace, PlacerSettings())
        return assumptions(variants, self.options, work, trace.jobs, endless=self.fills(trace))

    def simulation(
        self,
        profile: str,
        seed: int,
        trace: Trace,
        sink: Callable[[bytes], object] | None = None,
        durations: Durations = "known",
    ) -> Simulation:
        """One run before its first step. Raises `BadFile`, `UnknownJobModel`, and the errors of
        `settings`."""
        settings = self._filled(self.settings(profile, seed), trace)
        work, options = self.work(seed, trace, settings), self.options._replace(durations=durations)
        return Simulation(self.cluster.under(seed), settings, work, trace.jobs, options, sink)


def begin(asked: SimulationOptions, names: Sequence[str], errors: Console) -> tuple[Given, Trace]:
    """The validated command line and the trace under the first seed, after every check that needs no run.

    Raises `BadCommand`, `BadCluster`, `BadFile`, `UnknownProfile`, `UnknownJobModel`.
    """
    collect_rarely()
    given = validate(asked)
    check_set(names, asked.set or ())
    for profile in names:
        given.settings(profile, asked.seed)
    trace = given.trace(asked.seed)
    given.simulation(names[0], asked.seed, trace)
    report_skipped(trace, errors)
    if misfits := given.misfits(trace):
        message = f"{misfits:,} jobs fit nowhere on this cluster; they count as arrived and find no place"
        errors.print(f"penstock: {message}", markup=False)
    return given, trace


def validate(asked: SimulationOptions) -> Given:
    """Raises `BadCommand`, `BadCluster`, `BadFile`."""
    generator = None if Path(asked.trace).exists() else generator_of(asked.trace)
    cluster = cluster_of(
        asked.cluster or (generator.cluster if generator is not None else _home(asked.trace))
    )
    job_model = asked.job_model or (generator.job_model if generator is not None else JOB_MODEL)
    checked_job_model(job_model)
    if renames_of(asked.columns) and generator is not None:
        raise BadCommand("--columns: a generator reads no file; leave it out, or give a trace")
    if asked.arrivals == "fill" and generator is not None:
        raise BadCommand("--arrivals fill: a generator has arrivals of its own; give a trace")
    if asked.arrivals == "fill" and job_model != JOB_MODEL:
        raise BadCommand(f"--truth {job_model}: jobs that fill a cluster never end; leave one of both out")
    for name in ("start_latency", "stop_latency", "ticks"):
        if not 0 <= getattr(asked, name) <= MAX_SECONDS:
            raise BadCommand(f"--{name.replace('_', '-')}: between 0 and {MAX_SECONDS:,} seconds")
    if not 0 <= asked.profile_noise <= 1:
        raise BadCommand("--profile-noise: between 0 and 1")
    restarts = restarts_of(asked.restart_cost)
    options = Options(
        latency=Latency(asked.start_latency, asked.stop_latency),
        single_gpu_workers=asked.single_gpu_workers,
        tick_s=asked.ticks,
        check_every_step=asked.check,
        slices_per_core=cluster.slices_per_core,
        grace_ms=grace_of(asked.grace, restarts),
        estimator_s=_planning_s("estimator", asked.estimator_time),
        planning_s=_planning_s("batcher", asked.batcher_time),
        profile_noise=asked.profile_noise,
        prelaunch=asked.prelaunch,
    )
    path = Path(asked.trace) if generator is not None else locate(asked.trace)
    return Given(asked, cluster, options, job_model, path, restarts, generator)


def _planning_s(service: str, text: str) -> float | None:
    """Planning time of a service in seconds; None: measured. Raises `BadCommand`."""
    if text == "measured":
        return None
    try:
        found = duration_ms(text) / 1_000
    except ValueError as error:
        raise BadCommand(f"--{service}-time: {error}, or measured") from error
    if found > MAX_SECONDS:
        raise BadCommand(f"--{service}-time: between 0 and {MAX_SECONDS:,} seconds, or measured")
    return found


def _home(trace: str) -> str:
    """The cluster of the trace's data set, if that lists its nodes."""
    data_set = trace.partition("/")[0]
    return data_set if data_set in NODE_SETS and not Path(trace).exists() else CLUSTER


def settings_of(profile: str, seed: int, pairs: Sequence[str]) -> PlacerSettings:
    """The settings of one of the profiles that are simulated: own settings of the others are left out. Raises
    `BadCommand`, `UnknownProfile`."""
    given = {"profile": profile, "seed": seed, **_set(pairs)}
    own = own_names(profile)
    known = (*PlacerSettings.__struct_fields__, *own)
    try:
        return profiles.settings_of({name: value for name, value in given.items() if name in known})
    except ValidationError as error:
        raise BadCommand(f"settings: {describe(error)}") from error
    except UnusedSetting as error:
        raise BadCommand(f"settings: {error}") from error


def check_set(names: Sequence[str], pairs: Sequence[str]) -> None:
    """Raises `BadCommand` for a `--set` that none of these profiles has, `UnknownProfile`."""
    own = {name for profile in names for name in own_names(profile)}
    known = {*PlacerSettings.__struct_fields__, *own} - {"profile", "seed"}
    for name in _set(pairs):
        if name not in known:
            there = ", ".join(sorted(known))
            raise BadCommand(f"--set {name}=…: NAME=VALUE with a setting of {' or '.join(names)}: {there}")


def _set(pairs: Sequence[str]) -> Mapping[str, object]:
    """Raises `BadCommand`."""
    values: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name in values or name in ("profile", "seed"):
            raise BadCommand(f"--set {pair}: NAME=VALUE with NAME once, and neither profile nor seed")
        try:
            values[name] = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise BadCommand(f"--set {pair}: the value is not JSON: {error}") from error
    return values


def report_skipped(trace: Trace, errors: Console) -> None:
    """Reports the lines that `--skip-bad` has left out, and columns of the file that no format reads."""
    for column, meant in trace.likely.items():
        errors.print(f"penstock: column {column} is not read; did you mean {meant}?", markup=False)
    if trace.passed:
        errors.print(f"penstock: left out: {passed_text(trace.passed)}", markup=False)
    for problem in trace.skipped[:MAX_SHOWN]:
        errors.print(f"penstock: skipped {problem}", markup=False)
    if trace.skipped:
        errors.print(f"penstock: {trace.skipped_lines} lines left out, with {len(trace.skipped)} problems")
