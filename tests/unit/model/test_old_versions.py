"""What events of earlier versions meant is what they mean."""

import json

from penstock.model.decisions.ledger_events import JobFoundSchedulable, JobFoundUnschedulable
from penstock.model.proposals import PlanProposed
from penstock.model.wire.codec import decode_fact


def fact(type_name: str, **fields: object) -> object:
    return decode_fact(type_name, json.dumps(fields).encode())


def test_a_finding_without_a_reason_revoked_an_earlier_one() -> None:
    """A ledger of last year: a node joined, and the job could run after all."""
    kind = "penstock.job.found_unschedulable.v1"
    assert fact(kind, job_id="j", reason="") == JobFoundSchedulable(job_id="j")
    assert fact(kind, job_id="j", reason="too large") == JobFoundUnschedulable(job_id="j", reason="too large")


def test_a_batch_was_answered_job_by_job_and_a_group_as_a_whole() -> None:
    """Plans of the first version named GPUs, and whether their jobs share these."""
    plans = [
        {"job_id": job_id, "tasks": [{"node_id": "n1", "gpus": [0], "cores": [0]}]} for job_id in ("a", "b")
    ]
    for kind, units in (("batch", [["a"], ["b"]]), ("group", [["a", "b"]])):
        found = fact("penstock.plan.proposed.v1", proposal_id="p", proposer="batcher", kind=kind, plans=plans)
        assert isinstance(found, PlanProposed)
        assert [[job.job_id for job in unit.jobs] for unit in found.units] == units
        assert {unit.kind for unit in found.units} == ({"group"} if kind == "group" else {"solo"})
