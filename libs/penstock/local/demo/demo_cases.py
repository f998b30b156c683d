"""The cases of `penstock demo`, one of which is shown at a time: which installation, which jobs, and which
part comes after them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.local.demo.demo_guard import GuardPart, Machine
from penstock.local.demo.demo_jobs import (
    DEVICES,
    ENOUGH,
    DemoJob,
    checkout,
    demo_jobs,
    guard_jobs,
    move_jobs,
    turn_jobs,
)
from penstock.local.demo.demo_moves import MovesPart
from penstock.local.demo.demo_part import Part, Say
from penstock.local.demo.demo_turns import TurnsPart
from penstock.local.options import DemoOptions
from penstock.local.services import acts_of
from penstock.text.counting import count

# a search for a training's cores takes half a minute, and with other cores its speed has to settle anew
WITHOUT = '["cores"]'
INTERVAL_MS = (
    6_000  # between two looks at a loss: by then it was reported anew, which is so every five seconds
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one demonstration shows."""

    options: DemoOptions
    headline: str
    environment: Mapping[str, str]
    """Settings of the services, where this shell has no others."""
    jobs: Sequence[DemoJob] = ()
    part: Callable[[Say], Part] | None = None
    """Made when the demo's folder is empty; runs after the jobs."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Commands for other demonstrations, and what they show."""


def case_of(options: DemoOptions) -> Case:
    """The one that is asked for. Raises `ConfigurationError` when the sample jobs are not there."""
    make = _turns if options.turns else _moves if options.moves else _jobs
    return make(options, checkout(options.jobs))


def _jobs(options: DemoOptions, folder: Path) -> Case:
    machine_cores = len(os.sched_getaffinity(0))
    options = options.of_jobs_that_meet(machine_cores)
    jobs = demo_jobs(folder)

    def part(say: Say) -> Part:
        training, other = guard_jobs(folder, options.folder, options.cores - 1)
        acts = acts_of(os.environ)
        machine = Machine(machine_cores, acts.profile, acts.eliminates)
        return GuardPart(training, other, machine, _end_of(options), say)

    return Case(
        options=options,
        headline=f"{len(jobs)} training jobs on {options.where}\n"
        "then one that a job without GPUs slows, until the contention-guard takes cores from that job",
        environment={"PENSTOCK_WITHOUT": WITHOUT},
        jobs=jobs,
        part=part,
        others={
            "penstock demo --turns": "in place of this one: four jobs take turns on one GPU",
            "penstock demo --moves": "in place of this one: a training moves to another node and resumes "
            "there",
        },
    )


def _turns(options: DemoOptions, folder: Path) -> Case:
    alone, together = turn_jobs(folder, options.folder)
    return Case(
        options=options.of_turns(),
        headline=f"{count(len(together), 'training job')}, each bound by another resource: first alone, then "
        "all at once on one GPU",
        environment={"PENSTOCK_PROFILE": "interleave"},
        part=lambda say: TurnsPart(alone, together, _end_of_one(options), say),
    )


def _moves(options: DemoOptions, folder: Path) -> Case:
    options, jobs = options.of_moves(), move_jobs(folder, options.folder)

    def part(say: Say) -> Part:
        acts = acts_of(os.environ)
        return MovesPart(jobs, acts.profile, _end_of(options), say, moves=acts.moves)

    return Case(
        options=options,
        headline=f"{count(len(jobs), 'training job')} on {options.where}, until the migrator moves the one "
        "that has converged",
        environment={
            "PENSTOCK_PROFILE": "specon",
            "PENSTOCK_CONVERGENCE": json.dumps({"interval_ms": INTERVAL_MS}),
        },
        part=part,
    )


def _end_of(options: DemoOptions) -> Callable[[], None]:
    """Ends the trainings that run until then."""
    end = _end_of_one(options)
    return lambda: end("")


def _end_of_one(options: DemoOptions) -> Callable[[str], None]:
    """Ends the training of this name."""
    folder = options.folder / DEVICES
    folder.mkdir()
    return lambda name: (folder / (f"{ENOUGH}-{name}" if name else ENOUGH)).touch()
