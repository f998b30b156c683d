"""What `penstock profile` asks about, and which input it refuses before it asks."""

import pytest

from penstock.cli.submission.profile import _asked
from penstock.exits import Stop
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import ResourceVector
from tests.support.cli.command_process import run

GIVEN = ("--workers", "1", "--batches", "16")


def job(**more: object) -> JobSpec:
    return JobSpec(command=("x",), model="resnet50", **more)  # type: ignore[arg-type]


def test_the_job_file_names_workers_and_batch_where_no_flag_does() -> None:
    """`batch_size` is of each worker, and the plan is about the samples of all of them together."""
    each = _asked(job(workers=4, batch_size=64), None, None, None)
    assert (each["workers"], each["batches"]) == ([4], [256])
    together = _asked(job(workers=4, min_workers=1, global_batch_size=64), None, None, None)
    assert (together["workers"], together["batches"]) == ([1, 2, 3, 4], [64])
    alone = _asked(job(batch_size=32), None, None, 3)
    assert (alone["workers"], alone["batches"], alone["runs"]) == ([1, 2, 4, 8], [32], 3)
    flags = _asked(job(batch_size=32), "4,2,2", "64, 128", None)
    assert (flags["workers"], flags["batches"]) == ([2, 4], [64, 128])


def test_a_job_whose_iterations_are_not_learned_is_refused() -> None:
    with pytest.raises(Stop, match="asks for no GPU"):
        _asked(job(batch_size=32, resources=ResourceVector(gpus=0)), None, None, None)
    with pytest.raises(Stop, match="parameter servers"):
        _asked(job(batch_size=32, parameter_servers=1), None, None, None)
    with pytest.raises(Stop, match="give --batches 64,128"):
        _asked(job(), None, None, None)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("a model!", *GIVEN), "model: "),
        (("resnet50", *GIVEN, "--budget", "-3"), "'--budget'"),
        (("resnet50", "--workers", "0,x", "--batches", "16"), "--workers 0,x: give up to 64 whole numbers"),
        (("resnet50", *GIVEN, "--iterations", "3"), "'--iterations'"),
    ],
)
def test_wrong_input_is_named_before_the_gateway_is_asked(arguments: tuple[str, ...], complaint: str) -> None:
    answer = run("profile", *arguments, "--dry-run", "--", "python", "train.py")
    assert answer.returncode == 2, answer.stderr
    assert complaint in answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
