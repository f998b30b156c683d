"""The command tree of `penstock`, as a table. A command's module is imported when the command is asked
for."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, cast

import typer
from typer.main import get_command

from penstock import __version__, commandline
from penstock.cli.session import Session
from penstock.commandline import Entry, LazyGroup
from penstock.exits import MEANING
from penstock.text.local_time import unknown_zone
from penstock.text.redaction import without_passwords

GLOBAL_FLAGS = ("--server", "--token-file", "--ca")
SIMULATOR = "penstock.simulator.commands"
PANELS: Mapping[str, Mapping[str, Entry]] = MappingProxyType(
    {
        "This machine": {
            "version": Entry("Print the version.", "penstock.cli.app:version"),
            "up": Entry(
                "Start everything on this machine, until Ctrl-C.",
                "penstock.local.commands:up",
                extra="local",
                examples=(
                    "penstock up",
                    "penstock up --nodes 2 --virtual-gpus 1",
                    "penstock up --real",
                ),
            ),
            "demo": Entry(
                "Watch a dozen real training jobs being placed, run and explained (one to two minutes).",
                "penstock.local.commands:demo",
                extra="local",
            ),
        },
        "Simulation": {
            "simulate": Entry(
                "Simulate a trace under a profile, in virtual time, and report its metrics.",
                f"{SIMULATOR}.simulate:simulate",
                extra="simulator",
                examples=(
                    "penstock simulate poisson/12-per-hour --cluster 2x8 --profile srtf",
                    "penstock simulate mine.csv --cluster 4x8 --columns submit_s=submit_time,gpus=num_gpu",
                ),
            ),
            "compare": Entry(
                "Simulate a trace under several profiles and seeds; report means with confidence intervals.",
                f"{SIMULATOR}.compare:compare",
                extra="simulator",
                examples=(
                    "penstock compare poisson/12-per-hour --cluster 2x8 --profiles fifo,srtf --seeds 4",
                    "penstock compare mine.csv --cluster 4x8 --profiles fifo,tiresias,srtf --report "
                    "policies.html",
                ),
            ),
            "traces": Entry(
                "List the available traces, describe one, or convert it to Penstock's CSV.",
                entries={
                    "ls": Entry("List all available traces.", f"{SIMULATOR}.traces:ls", extra="simulator"),
                    "describe": Entry(
                        "Describe a trace: sizes, run times, models, owners, GPU hours, load on a cluster.",
                        f"{SIMULATOR}.traces:describe",
                        extra="simulator",
                    ),
                    "convert": Entry(
                        "Convert a trace to Penstock's CSV, and list the columns that are lost.",
                        f"{SIMULATOR}.traces:convert",
                        extra="simulator",
                    ),
                },
            ),
            "report": Entry(
                "Report and plot the history of a cell: where and when jobs ran and waited, what was free.",
                f"{SIMULATOR}.report:report",
                extra="simulator",
            ),
            "estimator": Entry(
                "Report and check the estimates of jobs.",
                entries={
                    "report": Entry(
                        "Report and plot the accuracy of estimates against actual usage.",
                        "penstock_services.estimator.report:report",
                        extra="estimator",
                    ),
                    "models": Entry(
                        "List the stored models: training data, accuracy, and which one is in use.",
                        "penstock.cli.operations.estimator:models",
                    ),
                    "check": Entry(
                        "Repeat a job's estimate with the model that made it, and compare the two.",
                        "penstock.cli.operations.estimator:check",
                    ),
                },
            ),
            "export": Entry(
                "Export the jobs that the cell ran as a trace, to simulate them under another policy.",
                f"{SIMULATOR}.export:export",
                extra="simulator",
                examples=(
                    "penstock export --from 30d --nodes nodes.csv -o month.csv",
                    "penstock simulate month.csv --cluster nodes.csv --profile srtf",
                ),
            ),
        },
        "Jobs": {
            "submit": Entry(
                "Submit a job, follow it to its end and print its output. Ctrl-C stops following; the job "
                "continues.",
                "penstock.cli.submission.submit:submit",
                interspersed=False,
                examples=(
                    "penstock submit --gpus 1 -- python train.py",
                    "penstock submit -f job.yaml --venv .venv --detach",
                    "penstock submit --sync . --workers 2 --gpus 1 --host-memory 8GiB -- python train.py",
                ),
            ),
            "import": Entry(
                "Convert a job file of another scheduler, and name each key that has no equivalent.",
                "penstock.cli.submission.importing:import_file",
                examples=(
                    "penstock import sky.yaml -o job.yaml",
                    "penstock import train.sbatch --submit",
                ),
            ),
            "profile": Entry(
                "Measure the iteration times of a network in the few short runs that reduce the uncertainty "
                "most.",
                "penstock.cli.submission.profile:profile",
                examples=(
                    "penstock profile resnet50 -f job.yaml --batches 128,256,512 --dry-run",
                    "penstock profile resnet50 --workers 1,2,4 --batches 64,256 --budget 30 -- python "
                    "train.py",
                ),
            ),
            "wait": Entry(
                "Wait until jobs have ended; exits with the code of the first job that did not succeed.",
                "penstock.cli.following.wait:wait",
                examples=(
                    "penstock wait nightly --timeout 1h",
                    "penstock wait seed-0 seed-1 seed-2",
                ),
            ),
            "cancel": Entry(
                "Cancel jobs: SIGTERM, their grace, SIGKILL.",
                "penstock.cli.operations.acts:cancel",
                examples=(
                    "penstock cancel nightly",
                    'penstock cancel --idempotency-key "$CI_PIPELINE_ID-train"',
                ),
            ),
            "retry": Entry(
                "Submit a job that has ended once more: the same job under a new id, which is printed.",
                "penstock.cli.operations.acts:retry",
                examples=("penstock wait $(penstock retry nightly)",),
            ),
            "hold": Entry(
                "Hold jobs: they do not start until they are released. Running attempts continue.",
                "penstock.cli.operations.acts:hold",
            ),
            "release": Entry(
                "Release held jobs: they queue at their place by submission.",
                "penstock.cli.operations.acts:release",
            ),
            "checkpoint": Entry(
                "Ask a running job to save a checkpoint; it continues to train.",
                "penstock.cli.operations.acts:checkpoint",
                examples=('penstock checkpoint nightly --reason "before the upgrade"',),
            ),
            "exec": Entry(
                "Run a command in a running job's task, with its environment; exits with the command's code.",
                "penstock.cli.terminals.execute:execute",
                examples=(
                    "penstock exec nightly -- nvidia-smi",
                    "penstock exec -it nightly -- bash",
                    "penstock exec -i nightly -- tar -x < fix.tar",
                    "penstock exec nightly --task w1 -- py-spy dump --pid 2",
                ),
            ),
            "attach": Entry(
                "Attach to the terminal of a job that was submitted with -it; ctrl-p ctrl-q detaches.",
                "penstock.cli.terminals.attach:attach",
                examples=(
                    "penstock submit -it --gpus 1 -- bash",
                    "penstock attach nightly",
                ),
            ),
            "cores": Entry(
                "Give each running worker of a job N cores, until this attempt ends. For operators.",
                "penstock.cli.operations.acts:cores",
                examples=('penstock cores nightly 8 --reason "its loader starves"',),
            ),
            "move": Entry(
                "Move a running job: it saves, stops and resumes on the given nodes, which are reserved for "
                "it meanwhile. For operators.",
                "penstock.cli.operations.acts:move",
                examples=('penstock move nightly --to node-b1 --reason "its fans are loud"',),
            ),
        },
        "Inspection": {
            "get": Entry(
                "List jobs, groups, nodes or GPUs.",
                entries={
                    "jobs": Entry(
                        "List jobs, the latest last.",
                        "penstock.cli.queries.inspect:get_jobs",
                        examples=(
                            "penstock get jobs --state running --label sweep=first",
                            "penstock get jobs --owner alice --watch",
                            "penstock get jobs --deadline",
                        ),
                    ),
                    "job": Entry(
                        "Show one job as a line of the list; --watch follows it to its end.",
                        "penstock.cli.queries.inspect:get_job",
                    ),
                    "groups": Entry(
                        "List groups: jobs that take turns on the same GPUs.",
                        "penstock.cli.queries.groups:get_groups",
                    ),
                    "nodes": Entry(
                        "List nodes and their allocated resources.", "penstock.cli.queries.inspect:get_nodes"
                    ),
                    "gpus": Entry("List GPUs and the jobs on them.", "penstock.cli.queries.inspect:get_gpus"),
                },
            ),
            "describe": Entry(
                "Show one job or node in detail.",
                entries={
                    "job": Entry(
                        "Show one job: requested and allocated resources, tasks and times.",
                        "penstock.cli.queries.describe:describe_job",
                    ),
                    "node": Entry(
                        "Show one node: capacity, GPUs and the jobs on them.",
                        "penstock.cli.queries.describe:describe_node",
                    ),
                },
            ),
            "why": Entry(
                "Explain a job's placement, or why it still waits; now, or as of a past time or record.",
                "penstock.cli.queries.explain:why",
                examples=(
                    "penstock why nightly",
                    "penstock why nightly --at 5m",
                    "penstock why nightly --at 10:42",
                ),
            ),
            "logs": Entry(
                "Print a job's output.",
                "penstock.cli.following.logs:logs",
                examples=(
                    "penstock logs -f nightly",
                    "penstock logs nightly --task w0 --attempt 1 --tail 20",
                ),
            ),
            "events": Entry(
                "Print the events of a job, or of a node, in order. -o json: one event per line with "
                "--follow.",
                "penstock.cli.queries.inspect:events",
                examples=("penstock events nightly", "penstock events --node node-3"),
            ),
            "queue": Entry(
                "List waiting jobs in queue order, each with its reason.",
                "penstock.cli.queries.inspect:queue",
            ),
            "eta": Entry(
                "Estimate a job's remaining time with its interval, end, share done, and source.",
                "penstock.cli.queries.eta:eta",
            ),
            "watch": Entry(
                "Watch jobs change. With JOB: follow that job; exits with its exit code.",
                "penstock.cli.queries.live:watch",
            ),
            "top": Entry("Watch nodes, GPUs and the jobs on them.", "penstock.cli.queries.live:top"),
        },
        "Nodes": {
            "node": Entry(
                "Take a node out of use, back into use, or declare it dead.",
                entries={
                    "cordon": Entry(
                        "Place no further tasks on a node; its running tasks continue.",
                        "penstock.cli.operations.node:cordon",
                    ),
                    "drain": Entry(
                        "Cordon a node, stop its jobs with their grace and place them elsewhere.",
                        "penstock.cli.operations.node:drain",
                        examples=(
                            'penstock node drain node-1 --reason "new disk"',
                            "penstock node uncordon node-1",
                        ),
                    ),
                    "uncordon": Entry(
                        "Use a node again: end a cordon, a drain with it, and the suspicion after jobs "
                        "failed there.",
                        "penstock.cli.operations.node:uncordon",
                    ),
                    "fence": Entry(
                        "Declare a machine dead for certain: its jobs are placed elsewhere at once.",
                        "penstock.cli.operations.node:fence",
                    ),
                },
            ),
        },
        "Access": {
            "token": Entry(
                "Make a token for the gateway: its hash is added to the gateway's file, the token is printed "
                "to stdout once.",
                "penstock_services.gateway.tokens:token",
                extra="gateway",
                examples=(
                    "penstock token --roles submit,read --tenant vision --tokens tokens > alice.token",
                ),
            ),
        },
        "Checking": {
            "doctor": Entry(
                "Check this machine, what its services need, and the cell; exit code 1 when something is "
                "wrong.",
                "penstock.local.doctor.doctor:doctor",
                examples=(
                    "penstock doctor",
                    "penstock doctor --env-file /etc/penstock/placer/env",
                ),
            ),
            "backup": Entry(
                "Copy a running cell consistently: ledger, inputs, tables, keys. The copy is as secret as "
                "they are.",
                "penstock.backup.commands:backup",
                extra="local",
                examples=(
                    "penstock backup /srv/copies/monday",
                    "penstock backup /srv/copies/monday --verify",
                    "penstock backup copies/monday --folder .penstock",
                ),
            ),
            "restore": Entry(
                "Restore a copy into an empty log and database, in a new epoch: orders from after it count "
                "no more.",
                "penstock.backup.commands:restore",
                extra="local",
                examples=(
                    "penstock restore /srv/copies/monday",
                    "penstock restore copies/monday --folder .penstock",
                ),
            ),
            "projections": Entry(
                "Compare the read models with the ledger, or rebuild them.",
                entries={
                    "verify": Entry(
                        "Replay the ledger and compare the read models with it row by row; exit code 1 when "
                        "they differ.",
                        "penstock.cli.operations.admin:verify",
                    ),
                    "rebuild": Entry(
                        "Empty the read models and fill them again from the ledger.",
                        "penstock.cli.operations.admin:rebuild",
                    ),
                },
            ),
            "replay": Entry(
                "Repeat all decisions from the log and compare byte for byte; exit code 1 when something "
                "differs.",
                "penstock.cli.operations.admin:replay",
                examples=(
                    "penstock replay",
                    "penstock replay --decision nightly",
                ),
            ),
            "repair": Entry(
                "Amend a ledger record that cannot be decoded, before which its cell stands still. For "
                "operators.",
                "penstock.cli.operations.admin:repair",
                examples=(
                    "penstock repair --at 4711 --dry-run",
                    'penstock repair --at 4711 --reason "a training without end"',
                ),
            ),
        },
    }
)
"""Heading in the list of commands → command → its entry."""

app = commandline.new_app(
    cls=LazyGroup,
    name="penstock",
    help="Schedules deep-learning jobs on GPUs: submit a job without naming a node; see where it runs and "
    "why.",
    epilog="Exit codes: " + " · ".join(f"{code.value} {text}" for code, text in MEANING.items()),
    add_completion=True,
)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _globals(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(envvar="PENSTOCK_SERVER", help="The gateway, by default http://127.0.0.1:8742."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_TOKEN_FILE", help="File with a token for the gateway, if it requires one."
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_CA",
            help="PEM file of the certificate authority of an https gateway; by default those of this "
            "machine.",
        ),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    session = cast(Session, ctx.obj)
    session.server, session.token_file, session.ca = server, token_file, ca


def version() -> None:
    """Print the version."""
    print(f"penstock {__version__}")


def tree() -> LazyGroup:
    """The whole command tree."""
    return cast(LazyGroup, get_command(app)).fill(PANELS)


def hoist(arguments: Sequence[str]) -> list[str]:
    """Global flags may stand anywhere before `--`; typer wants them first."""
    arguments = list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    first: list[str] = []
    rest: list[str] = []
    position = 0
    while position < end:
        word = arguments[position]
        if word in GLOBAL_FLAGS and position + 1 < end:
            first += [word, arguments[position + 1]]
            position += 2
            continue
        (first if word.startswith(tuple(f"{flag}=" for flag in GLOBAL_FLAGS)) else rest).append(word)
        position += 1
    return [*first, *rest, *arguments[end:]]


def run(arguments: Sequence[str], session: Session | None = None) -> int:
    """Runs one command line without the leading `penstock`; returns its exit code (`penstock.exits`)."""
    session = session or Session(without_passwords(shlex.join(["penstock", *arguments])))
    if zone := unknown_zone():
        print(f"penstock: TZ={zone} is not a time zone of this machine; times are in UTC", file=sys.stderr)
    return commandline.run(tree(), hoist(arguments), "penstock", session, _remedy)


def _remedy(option: str) -> str:
    """What to give in place of an option of another scheduler; empty: not known."""
    from penstock.sdk.job_file.equivalents import flag  # imported for an error alone

    return flag(option) if option else ""
