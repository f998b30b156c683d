"""`penstock profile MODEL`: measures the time of an iteration, by workers and batch, in the few short runs
that reduce its uncertainty most."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Annotated, Any

import typer
from msgspec.structs import replace
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.common import Output, gateway
from penstock.cli.output import Format, dump, duration, remark, short_id, state
from penstock.cli.signals import exit_code, held, terminable
from penstock.cli.submission import job_flags, jobspec
from penstock.cli.submission.submit import CommandWords, FileFlag, spec_of
from penstock.client import Client
from penstock.client.connection import WORKER_TIMEOUT_S
from penstock.exits import OF_JOB, Exit, Stop
from penstock.model.jobs.job_parts import RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.commands import command_fields
from penstock.screen import console, plain_table
from penstock.sdk.progress import PROFILE_ITERATIONS
from penstock.text.counting import count

MAX_WORKERS_ASKED = 8  # 1, 2, 4, … where no number is given
LABEL = "penstock.profile"
BATCH, ITERATIONS = "{batch}", "{iterations}"
PLACE = "ON"
MS_PER_MINUTE = 60_000
UNKNOWN_FROM, FACTOR_FROM = 2.3, 0.4  # standard deviations of ln t: a factor of 10, and one half
NOTHING_KNOWN = 100.0  # ratio of an interval's upper end to its lower: above it nothing is known
Row = Mapping[str, Any]

WorkersFlag = Annotated[
    str | None,
    typer.Option(
        metavar="1,2,4", help="Numbers of workers to measure; by default those of the job file's range."
    ),
]
BatchesFlag = Annotated[
    str | None,
    typer.Option(metavar="64,128", help="Batch sizes of all workers together; by default the job file's."),
]
RunsFlag = Annotated[
    int | None,
    typer.Option(
        min=1, max=64, help="Maximum number of runs; by default the number of batches and placements."
    ),
]
IterationsFlag = Annotated[int, typer.Option(min=10, max=1_000_000, help="Iterations of each run.")]
BudgetFlag = Annotated[
    float | None,
    typer.Option(
        metavar="MINUTES", min=0.01, help="GPU minutes of all runs together; no run takes more than is left."
    ),
]


@job_flags.taken(
    "model command file gpus venv container env workers batches runs iterations budget dry_run output"
)
def profile(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the network, as in job files.")],
    command: CommandWords = None,
    file: FileFlag = None,
    workers: WorkersFlag = None,
    batches: BatchesFlag = None,
    runs: RunsFlag = None,
    iterations: IterationsFlag = 50,
    budget: BudgetFlag = None,
    dry_run: Annotated[
        bool, typer.Option(help="Only list the runs and the uncertainty that they would reduce.")
    ] = False,
    output: Output = Format.TABLE,
    **flags: Any,
) -> None:
    """Measure the iteration times of a network in the few short runs that reduce the uncertainty most.

    Exits with the code of the first run that did not succeed. The job is that of -f FILE or after --. Its
    script calls the SDK's `progress` once per iteration and is ended after the given number of iterations; it
    finds its batch in PENSTOCK_BATCH_SIZE, and {batch} and {iterations} in the command are replaced.
    """
    fields = (jobspec.read_job_file(file) if file is not None else {}) | {"model": model}
    programs = job_flags.given({name: flags[name] for name in ("venv", "container")})
    environment = {"environment": jobspec.environment(programs, path=False)}
    fields |= jobspec.located(job_flags.given(environment), os.getcwd())
    sections = {"resources": {"gpus": flags["gpus"]}, "env": jobspec.variables(flags["env"] or [], [])}
    spec = spec_of(fields, sections, command, file or "command line")
    asked = _asked(spec, workers, batches, runs)
    campaign = Campaign(lambda: gateway(ctx), spec, asked, iterations, budget, output)
    if dry_run:
        return campaign.show_plan()
    raise typer.Exit(campaign.run())


def _asked(spec: JobSpec, workers: str | None, batches: str | None, runs: int | None) -> dict[str, Any]:
    """The question to the gateway. Raises `Stop`."""
    each = spec.resources.gpus if spec.resources.gpus is not None else 1
    if each < 1:
        raise Stop(Exit.BAD_SPEC, "the job asks for no GPU; its iterations are not learned")
    if spec.parameter_servers:
        raise Stop(Exit.BAD_SPEC, "the job has parameter servers; only all-reduce is profiled")
    given = spec.global_batch_size or (spec.batch_size and spec.batch_size * spec.workers)
    if batches is None and given is None:
        raise Stop(
            Exit.BAD_SPEC,
            "nothing names a batch; give --batches 64,128, or global_batch_size in the job file",
        )
    if workers is not None:
        numbers = _numbers("--workers", workers)
    elif spec.min_workers is not None or spec.workers > 1:
        numbers = list(spec.offered)
    else:
        numbers = [1 << power for power in range(MAX_WORKERS_ASKED.bit_length())]
    return {
        "model": spec.model,
        "owner": spec.owner,
        "gpus": each,
        "gpu_models": list(spec.gpu_models),
        "workers": numbers,
        "batches": [given] if batches is None else _numbers("--batches", batches),
        "runs": runs,
    }


def _numbers(flag: str, text: str) -> list[int]:
    """Raises `Stop`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts) or len(parts) > 64:
        raise Stop(Exit.BAD_SPEC, f"{flag} {text[:64]}: give up to 64 whole numbers above 0, such as 1,2,4")
    return sorted({int(part) for part in parts})


@dataclass(slots=True)
class Campaign:
    """The profiling runs of one network, one after the other, so that none disturbs another."""

    connect: Callable[[], Client]
    spec: JobSpec
    asked: dict[str, Any]
    iterations: int
    budget: float | None
    output: Format
    made: list[dict[str, Any]] = field(default_factory=list)
    running: str | None = None
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.connect()

    def _known(self, runs: int | None) -> dict[str, Any]:
        body = {name: value for name, value in {**self.asked, "runs": runs}.items() if value is not None}
        found: dict[str, Any] = self.client.post("/v1/estimator/profile", body, patience_s=WORKER_TIMEOUT_S)
        return found

    def show_plan(self) -> None:
        found = self._known(self.asked["runs"])
        if self.output in (Format.JSON, Format.YAML):
            dump(found, self.output)
            return
        console().print(self._plan(found))

    def _plan(self, found: Row) -> RenderableType:
        heads = ("RUN", "WORKERS", "BATCH", PLACE, "EXPECTED", "GPU MINUTES", "DOUBT AFTER IT")
        table = plain_table(*heads, right=set(heads) - {PLACE})
        for number, run in enumerate(found["plan"], start=1):
            step_ms = run["step_ms"]
            run_ms = None if step_ms is None else self.iterations * step_ms
            gpu_minutes = None if run_ms is None else self._gpus(run["workers"]) * run_ms / MS_PER_MINUTE
            table.add_row(
                str(number),
                str(run["workers"]),
                f"{run['batch']:,}",
                _placement(run),
                duration(run_ms),
                "–" if gpu_minutes is None else f"{gpu_minutes:,.2f}",
                doubt(run["spread_after"]),
            )
        before, after = found["spread_before"], found["spread_after"]
        head = (
            f"{count(len(found['plan']), 'run')} of {self.iterations:,} iterations on {found['gpu']}; doubt "
            "about an iteration, over "
            f"{count(len(found['cells']), 'combination')} of workers and batch: {doubt(before)} before, "
            f"{doubt(after)} after"
        )
        return Group(Text(head), table) if found["plan"] else Text(head)

    def _gpus(self, workers: int) -> int:
        return int(workers * self.asked["gpus"])

    # ------------------------------------------------------------------------------------------ runs

    def run(self) -> int:
        """The exit code: that of the first run that did not succeed."""
        found = self._known(self.asked["runs"])
        if self.output not in (Format.JSON, Format.YAML):
            console().print(self._plan(found))
        with terminable():
            try:
                for number, probe in enumerate(found["plan"], start=1):
                    if not self._one(number, len(found["plan"]), probe):
                        break
            except KeyboardInterrupt as stop:
                self._interrupted()
                return int(exit_code(stop))
        after = self._known(0)
        self._report(found, after)
        codes = (OF_JOB.get(str(run["outcome"]), Exit.PROBLEM) for run in self.made)
        return int(next((code for code in codes if code), Exit.OK))

    def _one(self, number: int, runs: int, probe: Row) -> bool:
        """One run; False: the budget is used up."""
        left_ms = None
        if self.budget is not None:
            left_ms = int((self.budget - self._gpu_minutes()) * MS_PER_MINUTE / self._gpus(probe["workers"]))
            if left_ms < 1:
                left_out = count(runs - number + 1, "run")
                remark(f"the budget of {self.budget:g} GPU minutes is used up; left out: {left_out}")
                return False
        spec = self._probe(probe, left_ms)
        with held(really=True):
            handle = self.client.submit(spec)
            self.running = handle.job_id
        for warning in handle.warnings if number == 1 else ():
            remark(f"warning: {warning.field} {warning.message}; {warning.remedy}")
        handle.wait()
        job = self.client.find(handle.job_id, ended=True)
        self.running = None
        placed_ms = job["placed_ms"]
        gpu_ms = 0 if placed_ms is None else (job["ended_ms"] - placed_ms) * self._gpus(probe["workers"])
        self.made.append(
            {
                "job_id": job["job_id"],
                "workers": probe["workers"],
                "batch": probe["batch"],
                "outcome": job["outcome"],
                "reason": job["reason"],
                "gpu_minutes": gpu_ms / MS_PER_MINUTE,
            }
        )
        if self.output not in (Format.JSON, Format.YAML):
            what = f"{count(probe['workers'], 'worker')}, batch {probe['batch']:,}"
            why = "" if job["outcome"] == "succeeded" else f"  {job['reason'] or ''}"
            console().print(
                f"{number} of {runs}  {short_id(job['job_id'])}  {what}  {state(job['outcome'])}  "
                f"{gpu_ms / MS_PER_MINUTE:.2f} GPU minutes{why}",
                soft_wrap=True,
            )
        return True

    def _probe(self, probe: Row, left_ms: int | None) -> JobSpec:
        """The job of one run. `left_ms`: the run time after which it is stopped."""
        values = {BATCH: str(probe["batch"]), ITERATIONS: str(self.iterations)}
        limits = [ms for ms in (self.spec.run_timeout_ms, left_ms) if ms is not None]
        return replace(
            self.spec,
            name=f"{self.spec.name[:80]}-{probe['workers']}x{probe['batch']}",
            **command_fields([_filled(word, values) for word in self.spec.argv]),
            env={**self.spec.env, PROFILE_ITERATIONS: str(self.iterations)},
            labels={**self.spec.labels, LABEL: str(self.spec.model)},
            workers=probe["workers"],
            min_workers=None,
            batch_size=None,
            global_batch_size=probe["batch"],
            iterations=self.iterations,
            resources=replace(self.spec.resources, gpus=self.asked["gpus"]),
            run_timeout_ms=min(limits, default=None),
            retry=RetryPolicy(),
            checkpoint="none",
            prelaunch=False,
            qos=None,
            deadline_ms=None,
        )

    def _gpu_minutes(self) -> float:
        return float(sum(run["gpu_minutes"] for run in self.made))

    def _interrupted(self) -> None:
        """Cancels the run under way, which is this command's own. Earlier measurements stay."""
        if self.running is not None:
            with held():
                self.connect().post(
                    f"/v1/jobs/{self.running}/cancel", {"reason": "its profiling was interrupted"}
                )
            remark(f"\nCancelled {self.running}; measured before it: {count(len(self.made), 'run')}.")

    # ---------------------------------------------------------------------------------------- results

    def _report(self, before: Row, after: Row) -> None:
        if self.output in (Format.JSON, Format.YAML):
            whole = {
                "model": self.spec.model,
                "gpu": after["gpu"],
                "runs": self.made,
                "gpu_minutes": self._gpu_minutes(),
                "before": before["cells"],
                "after": after["cells"],
                "spread_before": before["spread_before"],
                "spread_after": after["spread_after"],
            }
            dump(whole, self.output)
            return
        head = (
            f"{self._gpu_minutes():.2f} GPU minutes; doubt about an iteration "
            f"{doubt(before['spread_before'])} before, "
            f"{doubt(after['spread_after'])} now"
        )
        console().print(Group(_cells(before["cells"], after["cells"]), Text(head)))


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _cells(before: Sequence[Row], after: Sequence[Row]) -> Table:
    heads = ("WORKERS", "BATCH", PLACE, "BEFORE", "ITERATION", "INTERVAL", "RUNS")
    table = plain_table(*heads, right=set(heads) - {PLACE})
    known = {(row["workers"], row["batch"]): row for row in before}
    for row in after:
        was = known.get((row["workers"], row["batch"]), {})
        table.add_row(
            str(row["workers"]),
            f"{row['batch']:,}",
            _placement(row),
            _interval(was),
            "–" if row["step_ms"] is None else f"{row['step_ms']:,.4g} ms",
            _interval(row),
            str(row["runs"] or "–"),
        )
    return table


def _placement(row: Row) -> str:
    """`2 × 4`: nodes, and GPUs on the node with most of them."""
    return f"{row['nodes']} × {row['gpus_per_node']}"


def _interval(row: Row) -> str:
    """`95 to 120 ms`; `–` where nothing is known."""
    low, high = row.get("low_ms"), row.get("high_ms")
    if low is None or high is None or high > NOTHING_KNOWN * low:
        return "–"
    return f"{low:,.4g} to {high:,.4g} ms"


def doubt(spread: float) -> str:
    """A standard deviation of ln t as `± 12 %`, or `a factor of 3.4` either way; from `UNKNOWN_FROM` on
    nothing is known."""
    if spread > UNKNOWN_FROM:
        return "unknown"
    if spread > FACTOR_FROM:
        return f"a factor of {exp(spread):.1f}"
    return f"± {100 * (exp(spread) - 1):.0f} %"
