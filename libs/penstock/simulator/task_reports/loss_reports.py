"""Loss reports of simulated training scripts, published through the node-reporter's own filter."""

from math import ceil

from penstock.ledger.state.job.job_state import JobState
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.simulator.job_models.model import LossReport
from penstock_services.node_reporter.core.reports.losses import LossFilter


class LossReports:
    """Filters of all running tasks; each attempt has a new one."""

    def __init__(self) -> None:
        self._filters: dict[str, LossFilter] = {}
        """Task id → filter."""

    def sample(self, report: LossReport, job: JobState) -> TelemetrySampled | None:
        """The sample that the chief's node publishes; None: the filter drops it."""
        task_id, task = next(iter(job.tasks.items()))
        at_ms = ceil(report.at_s * 1_000)
        losses = self._filters.get(task_id)
        if losses is None:
            losses = self._filters[task_id] = LossFilter()
        if not losses.passes(report.loss, at_ms):
            return None
        return TelemetrySampled(node_id=task.place.node_id, task_id=task_id, at_ms=at_ms, loss=report.loss)

    def over(self, task_id: str) -> None:
        """The task has ended."""
        self._filters.pop(task_id, None)
