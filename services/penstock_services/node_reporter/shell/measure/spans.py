"""Tracing spans of a node in its jobs' traces: `start` and `task`,
both children of the decision behind the order."""

from penstock.clock import wall_ms
from penstock.model.inputs.external_events import TaskExited, TaskStarted
from penstock.model.schema.event import Event
from penstock.runtime.tracing.tracer import Attribute, Tracing
from penstock_services.node_reporter.core.state import Context
from penstock_services.node_reporter.shell.ports import Key


class TaskSpans:
    """Caches the time of each start request, until the task ends; lost with the process."""

    def __init__(self, traces: Tracing, node_id: str) -> None:
        self._traces = traces
        self._node_id = node_id
        self._asked_ms: dict[Key, int] = {}

    def asked(self, key: Key) -> None:
        """The launcher is asked to start this task."""
        if self._traces.enabled:
            self._asked_ms[key] = wall_ms()

    def on_event(self, event: Event, context: Context) -> str | None:
        """Writes the span that the event completes; returns the context for its envelope.

        `context`: of the task's order; one that is not of its job's trace is not passed on.
        """
        above = context.traceparent
        if context.correlation_id is not None:
            above = self._traces.in_job(context.correlation_id, above)
        match event:
            case TaskStarted():
                return self._start(event, above)
            case TaskExited():
                return self._task(event, above)
            case _:
                return above

    def _start(self, event: TaskStarted, above: str | None) -> str | None:
        asked_ms = self._asked_ms.get((event.task_id, event.token), event.started_ms)
        found: dict[str, Attribute] = {
            "penstock.node_id": self._node_id,
            "penstock.task_id": event.task_id,
            "penstock.pid": event.pid,
        }
        return self._traces.span("start", above, asked_ms, event.started_ms, found, key=event.task_id)

    def _task(self, event: TaskExited, above: str | None) -> str | None:
        self._asked_ms.pop((event.task_id, event.token), None)
        found: dict[str, Attribute] = {
            "penstock.node_id": self._node_id,
            "penstock.task_id": event.task_id,
            "penstock.cause": event.cause,
            "penstock.exit_code": event.exit_code,
            "penstock.signal": event.signal,
        }
        well = event.cause == "stopped" or (event.cause == "exited" and event.exit_code == 0)
        error = None if well else event.detail or f"{event.cause}, exit code {event.exit_code}"
        start_ms, end_ms = event.started_ms, event.exited_ms
        return self._traces.span("task", above, start_ms, end_ms, found, key=event.task_id, error=error)
