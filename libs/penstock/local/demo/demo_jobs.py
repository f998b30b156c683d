"""The demo's jobs: real training runs, each with the ending it must come to."""

import os
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.errors import ConfigurationError
from penstock.model.jobs.job_spec import JobSpec
from penstock.sdk.job_file.jobfile import parse_job
from penstock.sdk.progress import PROFILE_ITERATIONS

OWNERS = ("alice", "bob", "carol")
BOUNDS = ("storage", "cpu", "gpu", "network")
ALONE_ITERATIONS = 40  # some tens show the stages of an iteration
DEVICES = "devices"  # of the jobs that take turns, in the demo's folder
# the file there that ends the trainings which run until then; of the jobs that take turns `enough-NAME` ends
# one
ENOUGH = "enough"
MAX_EPOCHS = MAX_ITERATIONS = 1_000_000  # hours
WHOLE = 2_000  # samples, all of them at once: the loss falls without noise
CONVERGES, LEARN = 0.3, (0.0002, 0.0003, 0.0004, 0.0005)
"""Learning rates: after 200 epochs hardly any loss is left to lose, or nearly all of it."""
SLOW_GPU_MS = "20"  # of an epoch of 21: five trainings leave the cores to others
# of an epoch of six: less of what else disturbs a core is in its time, and the loss of most of a core still
# is
GPU_MS = "4"


@dataclass(frozen=True, slots=True)
class DemoJob:
    """One job of the demo."""

    spec: JobSpec
    after_s: float
    """Submitted so long after the demo's start."""
    _: KW_ONLY
    after_job: str | None = None
    """Submitted once the job of this name has ended, instead."""
    outcome: str = "succeeded"
    exit_code: int | None = None
    attempts: int = 1
    cancel_after_s: float | None = None
    """Cancelled so long after its start."""


def demo_jobs(folder: Path) -> list[DemoJob]:
    """The jobs in order of submission. `folder`: the checkout's root, where the jobs run.

    Raises `ConfigurationError` when the sample jobs are not there.
    """
    samples = _with(folder, "train.py")
    train = [
        ("digits-mlp", "mlp", "digits", 64, 40, 1),
        ("digits-mlp-256", "mlp", "digits", 256, 50, 2),
        ("cancer-sgd", "sgd", "breast_cancer", 16, 40, 1),
        ("digits-forest", "forest", "digits", 64, 14, 4),
        ("digits-svm", "svm", "digits", 64, 24, 1),
        ("digits-kmeans", "kmeans", "digits", 128, 100, 2),
        ("iris-mlp", "mlp", "iris", 16, 100, 1),
        ("wine-forest", "forest", "wine", 32, 20, 4),
        ("wine-sgd", "sgd", "wine", 8, 50, 1),
    ]
    jobs: list[Mapping[str, Any]] = [_train(*row) for row in train]
    jobs[3:3] = [_file(samples, "digits-gang"), _softmax("softmax-32", 32, 1_200)]
    jobs[7:7] = [_file(samples, "diverges"), _file(samples, "too-big"), _softmax("softmax-256", 256, 2_500)]
    jobs.append(_file(samples, "digits-ps"))
    jobs.append({**_softmax("softmax-endless", 32, 1_000_000), "grace": "2s"})
    found = []
    for number, fields in enumerate(jobs):
        found.append(_expecting(_spec(fields, folder, OWNERS[number % len(OWNERS)]), after_s=0.3 * number))
    first = jobs[0]
    again = _spec({**first, "name": f"{first['name']}-again"}, folder)
    found.append(DemoJob(again, 0.0, after_job=first["name"]))  # its needs are known by then
    return found


def guard_jobs(folder: Path, state: Path, cores: int) -> tuple[DemoJob, DemoJob]:
    """A training that reports its steps, and a job without GPUs that keeps `cores` busy.
    `state`: as of `turn_jobs`."""
    training = _softmax("softmax-slowed", 32, MAX_EPOCHS)
    training["command"] += ["--gpu-ms", GPU_MS, "--until", str(state / DEVICES / ENOUGH)]
    training["resources"] = {"gpus": 1, "cores": 1}
    command = ["python", "tilt/jobs/augment.py", "--processes", str(cores)]
    other = {"name": "augment", "command": command, "resources": {"gpus": 0, "cores": cores}, "grace": "2s"}
    return DemoJob(_spec(training, folder), 0.0), DemoJob(_spec(other, folder), 0.0, outcome="cancelled")


def move_jobs(folder: Path, state: Path) -> list[DemoJob]:
    """Five trainings that save; the first converges within seconds.
    `state`, and what is raised: as of `turn_jobs`."""
    _with(folder, "softmax.py")
    rates = {"digits-converges": CONVERGES} | {f"digits-learns-{n}": rate for n, rate in enumerate(LEARN, 1)}
    found = []
    for name, rate in rates.items():
        fields = _softmax(name, WHOLE, MAX_EPOCHS)
        fields["command"] += ["--learning-rate", str(rate), "--gpu-ms", SLOW_GPU_MS, "--checkpoint"]
        fields["command"] += ["--until", str(state / DEVICES / ENOUGH)]
        fields |= {"resources": {"gpus": 1, "cores": 1}, "checkpoint": "sdk", "grace": "30s"}
        found.append(DemoJob(_spec(fields, folder), 0.0))
    return found


def turn_jobs(folder: Path, state: Path) -> tuple[list[DemoJob], list[DemoJob]]:
    """Four jobs, each bound by another resource: runs that measure their stages, and those that take turns.

    The first are profiling runs, from which no run times are learned: four jobs that are all expected to run
    equally long gain by turns whatever their order is, while of jobs
    with known run times the shorter ones gain more alone. `state`: the demo's folder. Raises
    `ConfigurationError` when the sample jobs are not there.
    """
    _with(folder, "four_stages.py")
    devices = state / DEVICES
    alone = [_four_stages(folder, devices, f"{bound}-alone", bound) for bound in BOUNDS]
    together = []
    for bound in BOUNDS:
        name = f"{bound}-together"
        together.append(_four_stages(folder, devices, name, bound, until=devices / f"{ENOUGH}-{name}"))
    return alone, together


def _four_stages(folder: Path, devices: Path, name: str, bound: str, until: Path | None = None) -> DemoJob:
    """`until`: the file that ends it; None: a profiling run."""
    command = ["python", "tilt/jobs/four_stages.py", "--bound", bound, "--folder", str(devices)]
    fields: dict[str, Any] = {
        "name": name,
        "command": command,
        "model": f"stages-{bound}",
        "batch_size": 2_048,
        "checkpoint": "sdk",
        "resources": {"gpus": 1, "cores": 2, "host_memory": "256MiB", "gpu_memory": "1MiB"},
    }
    if until is None:
        fields["env"] = {PROFILE_ITERATIONS: str(ALONE_ITERATIONS)}
    else:
        command += ["--iterations", str(MAX_ITERATIONS), "--until", str(until)]
    return DemoJob(_spec(fields, folder), 0.0)


def _with(folder: Path, script: str) -> Path:
    """The checkout's sample jobs. Raises `ConfigurationError` where this one is not among them."""
    samples = folder / "tilt" / "jobs"
    if not (samples / script).is_file():
        raise ConfigurationError(
            f"the demo's {script} is not in {samples}; run it from a checkout of Penstock, or name one with "
            "--jobs"
        )
    return samples


def _spec(fields: Mapping[str, Any], folder: Path, owner: str = OWNERS[0]) -> JobSpec:
    """NumPy and scikit-learn are in the environment that the demo runs in."""
    ours = {} if sys.prefix == sys.base_prefix else {"environment": {"venv": sys.prefix}}
    return parse_job({"owner": owner, **fields, **ours, "workdir": str(folder)})


def _expecting(spec: JobSpec, after_s: float) -> DemoJob:
    match spec.name:
        case "diverges":
            return DemoJob(spec, after_s, outcome="failed", exit_code=3, attempts=2)
        case "too-big":
            return DemoJob(spec, after_s, outcome="unschedulable")
        case "softmax-endless":
            return DemoJob(spec, after_s, outcome="cancelled", cancel_after_s=4.0)
    return DemoJob(spec, after_s)


def _train(name: str, model: str, data: str, batch_size: int, epochs: int, gpus: int) -> dict[str, Any]:
    flags = {"--model": model, "--data": data, "--batch-size": str(batch_size), "--epochs": str(epochs)}
    command = ["python", "tilt/jobs/train.py", *(word for pair in flags.items() for word in pair)]
    return {
        "name": name,
        "command": command,
        "model": model,
        "batch_size": batch_size,
        "resources": {"gpus": gpus},
    }


def _softmax(name: str, batch_size: int, epochs: int) -> dict[str, Any]:
    command = ["python", "tilt/jobs/softmax.py", "--batch-size", str(batch_size), "--epochs", str(epochs)]
    return {
        "name": name,
        "command": command,
        "model": "softmax",
        "batch_size": batch_size,
        "resources": {"gpus": 1},
    }


def _file(samples: Path, name: str) -> dict[str, Any]:
    """A sample job file as it is."""
    found = yaml.safe_load((samples / f"{name}.yaml").read_text(encoding="utf-8"))
    assert isinstance(found, dict), f"{name}.yaml holds no job"
    return found


def checkout(asked: Path | None) -> Path:
    """The checkout's root: what was asked for, else the current folder, else where this file comes from."""
    if asked:
        return Path(os.path.abspath(asked))
    here = Path.cwd()
    if (here / "tilt" / "jobs").is_dir():
        return here
    return Path(__file__).resolve().parents[4]
