"""Dry run of a submission: its estimate by the estimator's own code in a worker process,
and the odds of its deadline."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson

from penstock.errors import one_line
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.validation import checked
from penstock.model.wire.codec import as_written
from penstock.runtime.settings import Settings
from penstock.sdk.job_file.job_warnings import Doubt
from penstock_services.gateway.core.forecasts import deadline
from penstock_services.gateway.core.forecasts.deadline import Outlook
from penstock_services.gateway.core.problems import BadField, Problem
from penstock_services.gateway.shell.answers.models import answer_about_models
from penstock_services.gateway.shell.gateway import Gateway

Answer = dict[str, Any]


async def dry_run(gateway: Gateway, spec: JobSpec, doubts: Sequence[Doubt], *, estimated: bool) -> Answer:
    """The answer to a dry run. Without an estimator beside the gateway the answer states that, and is no
    error. `estimated`: whether the estimator is queried."""
    estimate: Estimate | None = None
    found: Outlook | None = None
    problem = ""
    try:
        if estimated:
            estimate, found = await _expected(gateway, spec)
    except Problem as error:
        problem = error.detail
    late = None if found is None else deadline.warning(found)
    warnings = [doubt._asdict() for doubt in (*doubts, *filter(None, [late]))]
    return {
        "estimate": None if estimate is None else as_written(estimate),
        "deadline": deadline.answer(found),
        "problem": problem,
        "warnings": warnings,
    }


async def refuse_late(gateway: Gateway, spec: JobSpec) -> None:
    """Raises `Problem` 409 for a job that would not be in time with the odds that count as certain, 400 for
    one that names no time, 503 where the estimator cannot be queried. A job without any estimate is not
    refused: else no job of its kind could ever be learned."""
    field = "deadline" if spec.deadline_ms is not None else "qos"
    if not spec.timed or (spec.deadline_ms is None and spec.qos == "urgent"):
        text, remedy = "names no deadline", "give a deadline, or qos prior or normal"
        raise Problem(400, "no_deadline", f"the job {text}; {remedy}", [BadField("deadline", text, remedy)])
    _, found = await _expected(gateway, spec)
    if found is None or found.odds is None or found.odds >= found.level:
        return
    remedy = deadline.would_hold(found)
    message = f"is met with a probability of {deadline.percent(found.odds)}, below {100 * found.level:.0f} %"
    raise Problem(
        409, "late", f"{field} {message}; {remedy}. Nothing was submitted", [BadField(field, message, remedy)]
    )


async def _expected(gateway: Gateway, spec: JobSpec) -> tuple[Estimate, Outlook | None]:
    """Raises `Problem`."""
    work = partial(ask_estimate, orjson.dumps(as_written(spec)))
    found = await answer_about_models(gateway, work)
    if not found["ok"]:
        raise Problem(503, "no_estimate", found["error"])
    estimate = checked(Estimate, found["estimate"], unknown="ignore")
    state, now_ms = gateway.follower.state, gateway.follower.now_ms()
    try:
        return estimate, deadline.tried(state, spec, estimate, now_ms, gateway.follower.forecasts)
    except Exception as error:
        raise Problem(503, "no_forecast", f"the profile's order failed: {one_line(error)}") from error


def ask_estimate(spec: bytes, settings: Settings) -> Answer:
    """The estimator's present answer. For a worker: it loads the estimator's libraries."""
    from penstock_services.estimator import present

    return asyncio.run(present.estimate_now(settings, checked(JobSpec, orjson.loads(spec), unknown="ignore")))
