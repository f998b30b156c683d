"""The command tree of `penstock`, as a table. A command's module is imported when the command is asked for."""

import shlex
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
from penstock.redaction import without_passwords

GLOBAL_FLAGS = ("--server", "--token-file", "--ca")
SIMULATOR = "penstock.simulator.commands"
PANELS: Mapping[str, Mapping[str, Entry]] = MappingProxyType({
    "This machine": {
        "version": Entry("Print the version.", "penstock.cli.app:version"),
        "up": Entry(
            "Start everything on this machine, until Ctrl-C.",
            "penstock.local.commands:up", extra="local",
            examples=(
                "penstock up",
                "penstock up --nodes 2 --virtual-gpus 1",
                "penstock up --real",
            ),
        ),
        "demo": Entry(
            "Watch a dozen real training jobs being placed, run and explained (one to two minutes).",
            "penstock.local.commands:demo", extra="local",
        ),
    },
    "Simulation": {
        "simulate": Entry(
            "Run a trace under a profile, in virtual time, and report how it did.",
            f"{SIMULATOR}.simulate:simulate", extra="simulator",
            examples=(
                "penstock simulate poisson/12-per-hour --cluster 2x8 --profile srtf",
                "penstock simulate mine.csv --cluster 4x8 --columns submit_s=submit_time,gpus=num_gpu",
            ),
        ),
        "compare": Entry(
            "Run a trace under several profiles and seeds; report means with confidence intervals.",
            f"{SIMULATOR}.compare:compare", extra="simulator",
            examples=(
                "penstock compare poisson/12-per-hour --cluster 2x8 --profiles fifo,srtf --seeds 4",
                "penstock compare mine.csv --cluster 4x8 --profiles fifo,tiresias,srtf --report policies.html",
            ),
        ),
        "traces": Entry("List the traces that are here, describe one, or convert it to our CSV.", entries={
            "ls": Entry("List all traces that are here.", f"{SIMULATOR}.traces:ls", extra="simulator"),
            "describe": Entry(
                "Describe a trace: sizes, run times, models, owners, GPU hours, load on a cluster.",
                f"{SIMULATOR}.traces:describe", extra="simulator",
            ),
            "convert": Entry(
                "Write a trace as our own CSV, and list the columns that have no place there.",
                f"{SIMULATOR}.traces:convert", extra="simulator",
            ),
        }),
        "report": Entry(
            "Report and draw what a cell did: who ran where and when, who waited, what was free.",
            f"{SIMULATOR}.report:report", extra="simulator",
        ),
        "estimator": Entry("What jobs are expected to need: report and check it.", entries={
            "report": Entry(
                "Report and draw how estimates did against what jobs used.",
                "penstock_services.estimator.report:report", extra="estimator",
            ),
            "models": Entry(
                "List the stored models: what they learned from, how they did, which one answers.",
                "penstock.cli.estimator:models",
            ),
            "check": Entry(
                "Ask the model that a job was estimated with again: does it give the same answer?",
                "penstock.cli.estimator:check",
            ),
        }),
        "export": Entry(
            "Write the jobs that the cell ran as a trace: last month, to be run again under another policy.",
            f"{SIMULATOR}.export:export", extra="simulator",
            examples=(
                "penstock export --from 30d --nodes nodes.csv -o month.csv",
                "penstock simulate month.csv --cluster nodes.csv --profile srtf",
            ),
        ),
    },
    "Jobs": {
        "submit": Entry(
            "Submit a job, follow it to its end and print its output. Ctrl-C stops following; the job goes on.",
            "penstock.cli.submit:submit", interspersed=False,
            examples=(
                "penstock submit --gpus 1 -- python train.py",
                "penstock submit -f job.yaml --venv .venv --detach",
                "penstock submit --sync . --workers 2 --gpus 1 --host-memory 8GiB -- python train.py",
            ),
        ),
        "profile": Entry(
            "Measure how long a network's iterations take, by the few short runs that lessen the doubt most.",
            "penstock.cli.profile:profile",
            examples=(
                "penstock profile resnet50 -f job.yaml --batches 128,256,512 --dry-run",
                "penstock profile resnet50 --workers 1,2,4 --batches 64,256 --budget 30 -- python train.py",
            ),
        ),
        "wait": Entry(
            "Wait until jobs have ended; ends with the code of the first of them that did not succeed.",
            "penstock.cli.wait:wait",
            examples=(
                "penstock wait nightly --timeout 1h",
                "penstock wait seed-0 seed-1 seed-2",
            ),
        ),
        "cancel": Entry("Cancel jobs: SIGTERM, their grace, SIGKILL.", "penstock.cli.acts:cancel"),
        "hold": Entry(
            "Hold jobs: they do not start until they are released. What runs of them runs on.",
            "penstock.cli.acts:hold",
        ),
        "release": Entry(
            "Release jobs that are held: they wait at their place by submission.", "penstock.cli.acts:release",
        ),
        "checkpoint": Entry(
            "Ask a running job to save what it has done; it trains on.", "penstock.cli.acts:checkpoint",
            examples=('penstock checkpoint nightly --reason "before the upgrade"',),
        ),
        "cores": Entry(
            "Give a job's running workers N cores each, as long as this attempt lasts. For operators.",
            "penstock.cli.acts:cores", examples=('penstock cores nightly 8 --reason "its loader starves"',),
        ),
        "move": Entry(
            "Move a running job: it saves, stops and goes on there, and nobody else gets its place meanwhile. For operators.",
            "penstock.cli.acts:move", examples=('penstock move nightly --to node-b1 --reason "its fans are loud"',),
        ),
    },
    "Looking": {
        "get": Entry("List jobs, groups, nodes or GPUs.", entries={
            "jobs": Entry("List jobs, the latest last.", "penstock.cli.inspect:get_jobs", examples=(
                "penstock get jobs --state running --label sweep=first",
                "penstock get jobs --owner alice --watch",
                "penstock get jobs --deadline",
            )),
            "job": Entry("One job as a line of the list; --watch follows it to its end.", "penstock.cli.inspect:get_job"),
            "groups": Entry("List groups: jobs that take turns on the same GPUs.", "penstock.cli.groups:get_groups"),
            "nodes": Entry("List nodes and what of them is used.", "penstock.cli.inspect:get_nodes"),
            "gpus": Entry("List GPUs and the jobs on them.", "penstock.cli.inspect:get_gpus"),
        }),
        "describe": Entry("Everything about one job or node.", entries={
            "job": Entry(
                "Everything about one job: what it asked for and got, its tasks and its times.",
                "penstock.cli.inspect:describe_job",
            ),
            "node": Entry(
                "Everything about one node: capacity, GPUs and who is on them.",
                "penstock.cli.inspect:describe_node",
            ),
        }),
        "why": Entry(
            "Why a job is where it is, or why it still waits; now, or as of a past time or record.",
            "penstock.cli.inspect:why",
            examples=(
                "penstock why nightly",
                "penstock why nightly --at 5m",
                "penstock why nightly --at 10:42",
            ),
        ),
        "logs": Entry("Print a job's output.", "penstock.cli.logs:logs", examples=(
            "penstock logs -f nightly",
            "penstock logs nightly --task w0 --attempt 1 --tail 20",
        )),
        "events": Entry(
            "Print what happened to a job, in order. -o json: one event per line with --follow.",
            "penstock.cli.inspect:events",
        ),
        "queue": Entry(
            "Jobs that wait, first in line first, each with its reason.",
            "penstock.cli.inspect:queue",
        ),
        "eta": Entry(
            "How long a job still takes: time left with its interval, end, share done, and the source.",
            "penstock.cli.eta:eta",
        ),
        "watch": Entry(
            "Watch jobs change. With JOB: follow that one; ends with its exit code.",
            "penstock.cli.live:watch",
        ),
        "top": Entry("Watch nodes, GPUs and the jobs on them.", "penstock.cli.live:top"),
    },
    "Nodes": {
        "node": Entry("Take a node out of use, back into use, or declare it dead.", entries={
            "cordon": Entry("Place nothing new on a node; what runs there runs on.", "penstock.cli.node:cordon"),
            "drain": Entry(
                "Cordon a node, stop its jobs with their grace and place them elsewhere.", "penstock.cli.node:drain",
                examples=(
                    'penstock node drain node-1 --reason "new disk"',
                    "penstock node uncordon node-1",
                ),
            ),
            "uncordon": Entry("End a cordon, and a drain with it.", "penstock.cli.node:uncordon"),
            "fence": Entry(
                "State that a machine is dead for sure: its jobs are placed elsewhere at once.",
                "penstock.cli.node:fence",
            ),
        }),
    },
    "Access": {
        "token": Entry(
            "Make a token for the gateway: its hash goes into the gateway's file, the token to stdout, once.",
            "penstock_services.gateway.tokens:token", extra="gateway",
            examples=(
                "penstock token --roles submit,read --tenant vision --tokens tokens > alice.token",
            ),
        ),
    },
    "Checking": {
        "doctor": Entry(
            "Check this machine, what its services need, and the cell; exit code 1 when something is wrong.",
            "penstock.local.doctor:doctor",
            examples=(
                "penstock doctor",
                "penstock doctor --env-file /etc/penstock/placer.env",
            ),
        ),
        "projections": Entry("Compare the read models with the ledger, or rebuild them.", entries={
            "verify": Entry(
                "Replay the ledger and compare the read models with it row by row; exit code 1 when they differ.",
                "penstock.cli.admin:verify",
            ),
            "rebuild": Entry(
                "Empty the read models and fill them again from the ledger.",
                "penstock.cli.admin:rebuild",
            ),
        }),
        "replay": Entry(
            "Decide everything again from the log and compare byte for byte; exit code 1 when something differs.",
            "penstock.cli.admin:replay",
            examples=(
                "penstock replay",
                "penstock replay --decision nightly",
            ),
        ),
    },
})  # fmt: skip
"""Heading in the list of commands → command → its entry."""

app = commandline.new_app(
    cls=LazyGroup,
    name="penstock",
    help="Schedules deep-learning jobs on GPUs: submit a job without naming a node; see where it runs and why.",
    epilog="Exit codes: " + " · ".join(f"{code.value} {text}" for code, text in MEANING.items()),
    add_completion=True,
)


@app.callback()
def _globals(
    ctx: typer.Context,
    server: Annotated[
        str | None,
        typer.Option(envvar="PENSTOCK_SERVER", help="The gateway, by default http://127.0.0.1:8742."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(envvar="PENSTOCK_TOKEN_FILE", help="File with a token of the gateway, if it wants one."),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PENSTOCK_CA",
            help="PEM file of the authority of an https gateway; by default those of this machine.",
        ),
    ] = None,
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
    return commandline.run(tree(), hoist(arguments), "penstock", session)
