"""Visibility of a job's fields to a caller: its tenant and operators see all of it, others only its
scheduling. Pure.

Every reader sees: which job of which tenant waits or runs where since when, on how much, and why. The rest
may hold data for its tenant alone: program, variables, names, output, errors. A new field of a row is hidden
until it is listed here.
"""

from collections.abc import Mapping
from typing import Any

from penstock.cluster.reasons import Reason
from penstock_services.gateway.core.access import Caller, Role

Row = dict[str, Any]

HIDDEN = "hidden"
"""Key of a row with hidden fields: the names of those fields, whose values are null."""
OF_JOBS = frozenset(
    {
        "job_id",
        "seq",
        "owner",
        "status",
        "workers",
        "parameter_servers",
        "attempt",
        "infrastructure_retries",
        "submitted_seq",
        "token",
        "submitted_ms",
        "queued_ms",
        "placed_ms",
        "running_ms",
        "ended_ms",
        "outcome",
        "stop_reason",
        "unschedulable",
        "nodes",
        "gpus",
        "cores",
        "unproven",
        "eta",
        "now_ms",
    }
)
OF_EVENTS = frozenset(
    {"seq", "n", "at_ms", "type", "kind", "term", "job_id", "node_id", "task_id", "explanation"}
)
OF_REASONS = frozenset(
    {
        "job_id",
        "seq",
        "record_ms",
        "now_ms",
        "status",
        "reason",
        "text",
        "next_step",
        "now_or_never",
        "histogram",
        "feasible",
        "position",
        "ahead",
        "waited_ms",
        "unproven",
        "owner",
        "detail",
        "placement",
        "start",
    }
)
QUOTING = frozenset({"penstock.input.rejected", "penstock.input.dead_lettered"})
"""Events without a job whose reason may quote the client's input."""


def sees_all(caller: Caller) -> bool:
    """Whether nothing is hidden from the caller, for any job."""
    return Role.OPERATE in caller.roles


def job_for(caller: Caller, row: Row) -> Row:
    """The job's row."""
    return row if caller.may_act_for(row["owner"]) else _only(OF_JOBS, row)


def event_for(caller: Caller, row: Row, owner: str | None) -> Row:
    """An event's or decision's row. `owner`: of its job;
    None: it has no job, or one that has left the tables."""
    if row["job_id"] is None:
        return row if sees_all(caller) or row.get("type") not in QUOTING else _only(OF_EVENTS, row)
    own = owner is not None and caller.may_act_for(owner)
    return row if own or sees_all(caller) else _only(OF_EVENTS, row)


def reason_for(caller: Caller, row: Row, owner: str) -> Row:
    """An answer to `why`, or a row of the queue.
    Between attempts and after the end its details are the error."""
    if caller.may_act_for(owner):
        return row
    figures = row.get("reason") not in (None, Reason.HELD, Reason.BACKOFF, Reason.AWAITING_ESTIMATE)
    return _only(OF_REASONS if figures else OF_REASONS - {"detail"}, row)


def _only(shown: frozenset[str], row: Mapping[str, Any]) -> Row:
    found = {name: value if name in shown else None for name, value in row.items()}
    return found | {HIDDEN: sorted(row.keys() - shown)}
