"""`penstock submit --dry-run`: the job as it would be submitted, and what the gateway says of it."""

from collections.abc import Callable

from penstock.cli.output import Format, dump, remark
from penstock.cli.queries import deadlines
from penstock.client import Client
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S
from penstock.exits import Stop
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written
from penstock.sdk.job_file.job_warnings import warnings_of


def show(connect: Callable[[], Client], spec: JobSpec, output: Format) -> None:
    """Prints the job, and on stderr the warnings of a submission and the forecast of its deadline.

    A gateway that does not answer is no error: the job is checked all the same, by this machine.
    """
    warnings = [doubt._asdict() for doubt in warnings_of(spec)]
    bound_s = WORKER_TIMEOUT_S if spec.timed else TIMEOUT_S
    try:
        answer = connect().post(
            "/v1/jobs", as_written(spec), patience_s=bound_s, dry_run=True, estimate=spec.timed
        )
    except Stop as stop:
        what = "nor whether it will be in time" if spec.timed else ""
        remark(f"not known whether this cell can run it{what and f', {what}'}: {stop}")
    else:
        warnings = answer["warnings"]
        if answer["problem"]:
            remark(f"not known whether it will be in time: {answer['problem']}")
        if answer["deadline"]:
            remark(deadlines.in_a_line(answer["deadline"]))
    for warning in warnings:
        remark(f"warning: {warning['field']} {warning['message']}; {warning['remedy']}")
    dump(as_written(spec), Format.YAML if output is not Format.JSON else Format.JSON)
