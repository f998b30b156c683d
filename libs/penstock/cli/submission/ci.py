"""Keys of submissions in CI: the same for the same job in the same attempt of the same step, and the next one
once that job has failed."""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from penstock.model.inputs.followers import PIPELINE_GONE
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written

INTERRUPTED = "its submit was interrupted"
"""Reason of the cancellation by `submit` itself."""

CI_VARIABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "github",
        ("GITHUB_REPOSITORY", "GITHUB_RUN_ID", "GITHUB_RUN_ATTEMPT", "GITHUB_JOB"),
        ("GITHUB_ACTION",),
    ),
    ("gitlab", ("CI_SERVER_HOST", "CI_JOB_ID"), ()),
    ("buildkite", ("BUILDKITE_JOB_ID",), ()),
    ("circleci", ("CIRCLE_WORKFLOW_JOB_ID", "CIRCLE_NODE_INDEX"), ()),
    # SYSTEM_JOBID is the same in each build of a pipeline with one job.
    ("azure", ("SYSTEM_COLLECTIONID", "BUILD_BUILDID", "SYSTEM_JOBID"), ("SYSTEM_JOBATTEMPT",)),
    ("jenkins", ("JENKINS_URL", "BUILD_TAG"), ("STAGE_NAME",)),
)
"""Per CI system the variables that name one attempt of one of its jobs, then those that name the step where
there are several. A system counts when all of the former are set."""


def is_ci(env: Mapping[str, str] = os.environ) -> bool:
    """Whether a CI system runs this command: one of the table, or any that sets CI,
    as all do by convention."""
    known = any(all(env.get(name) for name in names) for _, names, _ in CI_VARIABLES)
    return known or env.get("CI", "").lower() in ("true", "1")


def idempotency_key(spec: JobSpec, env: Mapping[str, str] = os.environ) -> str:
    """In CI the same key for the same job of the same step and attempt, so that a repeated step submits once;
    else random."""
    for system, names, of_step in CI_VARIABLES:
        values = [env.get(name, "") for name in names]
        if all(values):
            values += [env.get(name, "") for name in of_step]
            text = json.dumps([system, *values, as_written(replace(spec, tied_to=None))], sort_keys=True)
            return f"ci-{system}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return f"cli-{secrets.token_hex(16)}"


def is_tried_again(job: Mapping[str, Any]) -> bool:
    """Whether a step that submits this job again means another run: the job has ended without success, and no
    person has cancelled it."""
    if job["outcome"] == "cancelled":
        return str(job.get("reason") or "").startswith((INTERRUPTED, PIPELINE_GONE))
    return job["outcome"] not in (None, "succeeded")
