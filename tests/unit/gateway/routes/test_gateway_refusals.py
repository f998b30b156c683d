"""Requests that the gateway refuses before they reach the log, so that the sender gets the reason."""

import pytest

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import MAX_JOB_ID_CHARS
from penstock.model.wire.envelope import Envelope
from penstock.sdk.job_file.job_warnings import warnings_of
from penstock.sdk.job_file.jobfile import parse_job
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.shell.routes.events import _check_accepted


def submission(job_id: str) -> Envelope:
    data = JobSubmitted(job_id=job_id, spec=JobSpec(command=("true",)))
    return Envelope(id="ci-1", source="/ci", time_ms=0, data=data)


def test_a_job_id_must_leave_room_for_its_tasks() -> None:
    """A CI system sends its own ids; an acknowledged job that the placer then rejects would be lost
    silently."""
    _check_accepted(submission("x" * MAX_JOB_ID_CHARS))
    _refused("x" * (MAX_JOB_ID_CHARS + 1))


def test_a_job_must_be_reachable_by_its_path() -> None:
    """An id made of a branch's name: the job would run, but nobody could look at it or cancel it."""
    _check_accepted(submission("ci.main:4711"))
    _refused("feature/faster")


def _refused(job_id: str) -> None:
    with pytest.raises(Problem) as refused:
        _check_accepted(submission(job_id))
    assert refused.value.status == 400
    assert "data.job_id" in str(refused.value.body())


@pytest.mark.parametrize("written", [8, "8", "8MiB"])
def test_eight_that_may_mean_gibibytes_is_warned_of(written: object) -> None:
    """`--host-memory 8`: the job is accepted, and would be killed at 8 MiB."""
    spec = parse_job({"command": ["x"], "resources": {"host_memory": written, "gpu_memory": "8GiB"}})
    [warning] = warnings_of(spec)
    assert warning.field == "resources.host_memory_mib"
    assert "8 MiB" in warning.message
    assert "8GiB" in warning.remedy
