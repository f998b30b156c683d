"""Lines of progress that a task writes, and their parser."""

import json

from penstock.model.inputs.external_events import (
    StepsMeasured,
)
from penstock_services.node_reporter.core.reports.progress import (
    ProgressParser,
    Report,
)

NOW_MS = 1_700_000_000_000
KEY = ("job-1.1.0", 7)


def parser(*, leads: bool = True) -> ProgressParser:
    return ProgressParser("n1", *KEY, leads=leads, checkpoints="/state/checkpoints/job-1")


def steps(done: int, **more: float) -> bytes:
    return json.dumps({"steps": {"done": done, **more}}).encode() + b"\n"


def done_of(reports: list[Report]) -> list[int]:
    return [one.event.done for one in reports if isinstance(one.event, StepsMeasured)]
