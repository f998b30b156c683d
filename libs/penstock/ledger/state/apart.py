"""Kinds of jobs that share no GPUs in turns for a time, since a group of such jobs was dissolved
(`GroupDissolved`).

A kind is what recurs: the tenant, the network (else the job's name), the batch size of a worker and the GPUs
of all workers, as of stage profiles (`penstock.ledger.derived.stages`), by which groups are planned.
"""

from collections.abc import MutableMapping

from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.groups import GroupDissolved
from penstock.model.nouns.types import Milliseconds, Value

MAX_APART = 256  # pairs; a dropped one is remembered again after a minute below its promise


class Apart(Value, frozen=True):
    """A pair of kinds, in order; may be equal."""

    one: str
    other: str
    until_ms: Milliseconds
    """Ledger time."""
    reason: str


def kind_of(job: JobState) -> str:
    """The job's kind. Only for jobs with an estimate."""
    assert job.estimate is not None, job.job_id
    spec = job.spec.shaped(job.workers)
    gpus = spec.workers * job.estimate.worker.gpus
    return f"{spec.owner} {spec.model or spec.name} {spec.batch_size or 0} {gpus}"


def key_of(one: str, other: str) -> str:
    """The pair's key, whatever their order."""
    return " | ".join(sorted((one, other)))


def remember(apart: MutableMapping[str, Apart], fact: GroupDissolved, now_ms: int) -> None:
    """Adds the pairs of the group, and drops those whose time is over."""
    for key in [key for key, pair in apart.items() if pair.until_ms <= now_ms]:
        del apart[key]
    for pair in fact.apart:
        one, other = sorted((pair.one, pair.other))
        key = key_of(one, other)
        apart.pop(key, None)
        apart[key] = Apart(one, other, fact.until_ms, fact.reason)
        if len(apart) > MAX_APART:
            del apart[next(iter(apart))]
