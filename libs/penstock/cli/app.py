"""The tree of `penstock`'s commands. A command's module is imported when the command is asked for."""

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

GLOBAL_FLAGS = ("--server", "--token-file")
HERE, SIMULATION, JOBS, LOOKING, CHECKING = "This machine", "Simulation", "Jobs", "Looking", "Checking"
SIMULATOR = "penstock.simulator.commands"
COMMANDS: Mapping[str, Entry] = MappingProxyType(
    {
        "version": Entry(help="Print the version.", target="penstock.cli.app:version", panel=HERE),
        "up": Entry(
            help="Start everything on this machine, until Ctrl-C.",
            target="penstock.local.commands:up", panel=HERE, extra="local",
        ),
        "demo": Entry(
            help="Watch a dozen real training jobs being placed, run and explained (about a minute).",
            target="penstock.local.commands:demo", panel=HERE, extra="local",
        ),
        "simulate": Entry(
            help="Run a trace under a profile, in virtual time, and report how it did.",
            target=f"{SIMULATOR}.simulate:simulate", panel=SIMULATION, extra="simulator",
        ),
        "compare": Entry(
            help="Run a trace under several profiles and seeds; report means with confidence intervals.",
            target=f"{SIMULATOR}.compare:compare", panel=SIMULATION, extra="simulator",
        ),
        "traces": Entry(
            help="List the traces that are here, describe one, or convert it to our CSV.",
            panel=SIMULATION,
            entries={
                "ls": Entry(
                    help="List all traces that are here.", target=f"{SIMULATOR}.traces:ls", extra="simulator"
                ),
                "describe": Entry(
                    help="Describe a trace: sizes, run times, models, owners, GPU hours, load on a cluster.",
                    target=f"{SIMULATOR}.traces:describe", extra="simulator",
                ),
                "convert": Entry(
                    help="Write a trace as our own CSV, and list the columns that have no place there.",
                    target=f"{SIMULATOR}.traces:convert", extra="simulator",
                ),
            },
        ),
        "report": Entry(
            help="Report and draw what a cell did: who ran where and when, who waited, what was free.",
            target=f"{SIMULATOR}.report:report", panel=SIMULATION, extra="simulator",
        ),
        "estimator": Entry(
            help="What jobs are expected to need: judge it.",
            panel=SIMULATION,
            entries={
                "report": Entry(
                    help="Report and draw how estimates did against what jobs used.",
                    target="penstock_services.estimator.report:report", extra="estimator",
                ),
                "models": Entry(
                    help="List the stored models: what they learned from, how they did, which one answers.",
                    target="penstock.cli.estimator:models",
                ),
                "check": Entry(
                    help="Ask the model that a job was estimated with again: does it give the same answer?",
                    target="penstock.cli.estimator:check",
                ),
            },
        ),
        "export": Entry(
            help="Write the jobs that the cell ran as a trace: last month, to be run again under another policy.",
            target=f"{SIMULATOR}.export:export", panel=SIMULATION, extra="simulator",
        ),
        "submit": Entry(
            help="Submit a job and follow it to its end. Ctrl-C stops following; the job goes on.",
            target="penstock.cli.submit:submit", panel=JOBS, interspersed=False,
        ),
        "cancel": Entry(
            help="Cancel a job: SIGTERM, its grace, SIGKILL.", target="penstock.cli.admin:cancel", panel=JOBS
        ),
        "get": Entry(
            help="List jobs, nodes or GPUs.",
            panel=LOOKING,
            entries={
                "jobs": Entry(help="List jobs, the latest last.", target="penstock.cli.inspect:get_jobs"),
                "nodes": Entry(
                    help="List nodes and what of them is used.", target="penstock.cli.inspect:get_nodes"
                ),
                "gpus": Entry(help="List GPUs and the jobs on them.", target="penstock.cli.inspect:get_gpus"),
            },
        ),
        "describe": Entry(
            help="Everything about one job or node.",
            panel=LOOKING,
            entries={
                "job": Entry(
                    help="Everything about one job: what it asked for and got, its tasks and its times.",
                    target="penstock.cli.inspect:describe_job",
                ),
                "node": Entry(
                    help="Everything about one node: capacity, GPUs and who is on them.",
                    target="penstock.cli.inspect:describe_node",
                ),
            },
        ),
        "why": Entry(
            help="Why a job is where it is, or why it still waits; now, or as of any past record.",
            target="penstock.cli.inspect:why", panel=LOOKING,
        ),
        "logs": Entry(help="Print a job's output.", target="penstock.cli.inspect:logs", panel=LOOKING),
        "events": Entry(
            help="Print what happened to a job, in order. -o json: one event per line with --follow.",
            target="penstock.cli.inspect:events", panel=LOOKING,
        ),
        "queue": Entry(
            help="Jobs that wait, first in line first, each with its reason.",
            target="penstock.cli.inspect:queue", panel=LOOKING,
        ),
        "eta": Entry(
            help="How long a job still takes: time left with its interval, end, share done, and the source.",
            target="penstock.cli.eta:eta", panel=LOOKING,
        ),
        "watch": Entry(
            help="Watch jobs change. With JOB: follow that one; ends with its exit code.",
            target="penstock.cli.live:watch", panel=LOOKING,
        ),
        "top": Entry(
            help="Watch nodes, GPUs and the jobs on them.", target="penstock.cli.live:top", panel=LOOKING
        ),
        "doctor": Entry(
            help="Check this machine and the gateway behind it; exit code 1 when something is wrong.",
            target="penstock.cli.admin:doctor", panel=CHECKING,
        ),
        "projections": Entry(
            help="Compare the read models with the ledger, or rebuild them.",
            panel=CHECKING,
            entries={
                "verify": Entry(
                    help="Replay the ledger and compare the read models with it row by row; exit code 1 when they differ.",
                    target="penstock.cli.admin:verify",
                ),
                "rebuild": Entry(
                    help="Empty the read models and fill them again from the ledger.",
                    target="penstock.cli.admin:rebuild",
                ),
            },
        ),
        "replay": Entry(
            help="Decide everything again from the log and compare byte for byte; exit code 1 when something differs.",
            target="penstock.cli.admin:replay", panel=CHECKING,
        ),
    }
)  # fmt: skip

app = commandline.new_app(
    cls=LazyGroup,
    name="penstock",
    help="Leads deep-learning jobs to GPUs: submit a job without saying where; see where it runs and why.",
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
        typer.Option(envvar="PENSTOCK_TOKEN_FILE", help="File with the gateway's token, if it wants one."),
    ] = None,
) -> None:
    session = cast(Session, ctx.obj)
    session.server, session.token_file = server, token_file


def version() -> None:
    """Print the version."""
    print(f"penstock {__version__}")


def tree() -> LazyGroup:
    """The whole command tree."""
    return cast(LazyGroup, get_command(app)).fill(COMMANDS)


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
    session = session or Session(shlex.join(["penstock", *arguments]))
    return commandline.run(tree(), hoist(arguments), "penstock", session)
