"""Soft node affinity: a job starts on nodes that it prefers, and not where an earlier attempt failed, if it
fits elsewhere now.

Ideal: each place is scored with its preference. Departure: policies have scores of their own; so each is
asked for a place on fewer nodes first, and on all allowed nodes if there is none. Jobs without preferences
cost nothing.
"""

from collections.abc import Iterator
from copy import copy

from msgspec.structs import replace

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.ledger.derived.resuming import only_home
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.jobs.job_parts import NodeChoice
from penstock.model.nouns.types import MAX_TEXT
from penstock.scheduling.stages.protocols import Choose


def preferring(job: JobState, choose: Choose) -> Choose:
    """As `choose`, on the nodes that this job prefers where it fits there; `choose` itself for a job
    without preferences."""
    nodes = job.spec.nodes
    if not job.retries.failed_on and (nodes is None or not nodes.prefer):
        return choose

    def chosen(state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        for narrower, why in _narrower(job, only_home(state, job)):
            plan = choose(state, narrower, rng)
            if plan is not None:
                return _explained(plan, why)
        return choose(state, job, rng)

    return chosen


def _narrower(job: JobState, home: str) -> Iterator[tuple[JobState, str]]:
    """Read-only copies of the job that allow fewer nodes, in the order in which they are tried, each with the
    reason.

    `home`: the only node that has its checkpoint is not avoided: the work would be lost for certain.
    """
    nodes = job.spec.nodes or NodeChoice()
    failed = tuple(node_id for node_id in job.retries.failed_on if node_id not in (*nodes.exclude, home))
    avoids = f"not on {', '.join(failed)}, where an attempt failed" if failed else ""
    among = f"on nodes that it prefers: {', '.join(nodes.prefer)}" if nodes.prefer else ""
    if failed and nodes.prefer:
        yield _on(job, nodes, nodes.prefer, failed), f"{among}; {avoids}"
    if failed:
        yield _on(job, nodes, (), failed), avoids
    if nodes.prefer:
        yield _on(job, nodes, nodes.prefer, ()), among


def _on(job: JobState, nodes: NodeChoice, prefer: tuple[str, ...], without: tuple[str, ...]) -> JobState:
    only = prefer or nodes.only
    if prefer and nodes.only:
        only = tuple(f"{one}&{other}" for one in nodes.only for other in prefer)
    found = copy(job)
    found.spec = replace(job.spec, nodes=NodeChoice(only=only, exclude=(*nodes.exclude, *without)))
    return found


def _explained(plan: Plan, why: str) -> Plan:
    reason = "; ".join(text for text in (plan.explanation.reason, why) if text)
    return replace(plan, explanation=replace(plan.explanation, reason=reason[:MAX_TEXT]))
