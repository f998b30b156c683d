"""Events as they are written: exact bytes, and nothing that a reader would refuse."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ledger.record.record import read
from penstock.model.inputs.external_events import JobProgress, TaskExited
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import ResourceVector, Usage
from penstock.model.schema.event import REGISTRY
from penstock.model.schema.validation import checked_json
from penstock.model.wire.codec import decode, encode
from penstock.simulator.engine import Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.text(max_size=20))
def test_numbers_and_texts_come_back_as_they_were(seconds: float, detail: str) -> None:
    """A job reports 1e22 seconds, a node a detail in any script."""
    progress = JobProgress(job_id="j", attained_s=seconds)
    assert json.loads(encode(progress)) == {"job_id": "j", "attained_s": seconds, "remaining_s": None}
    settings = msgspec.structs.replace(PlacerSettings(profile="fifo"), profile=detail)
    assert json.loads(encode(settings))["profile"] == detail


def test_large_numbers_are_written_in_one_form() -> None:
    """The hashes of old ledgers rest on the exponent's sign."""
    assert b'"attained_s":1e+22' in encode(JobProgress(job_id="j", attained_s=1e22))


def test_integers_beyond_64_bits_are_written() -> None:
    """A broken counter reports 2**70 milliseconds of CPU: the exit must not stop the ledger."""
    fields = {"node_id": "n", "task_id": "t", "token": 1, "cause": "exited", "started_ms": 1, "exited_ms": 2}
    exited = TaskExited(**fields, usage=Usage(cpu_ms=1 << 70))  # type: ignore[arg-type]
    assert decode("penstock.task.exited.v1", encode(exited)) == exited
    small = msgspec.structs.replace(exited, usage=Usage(cpu_ms=7))
    assert encode(exited).replace(str(1 << 70).encode(), b"7") == encode(small)


def test_a_share_that_is_whole_is_not_written() -> None:
    """Ledgers from before shares existed and of today have the same bytes where nobody shares."""
    assert b"gpu_share_milli" not in encode(ResourceVector(gpus=1))
    assert b'"gpu_share_milli":500' in encode(ResourceVector(gpus=1, gpu_share_milli=500))


def test_only_values_are_written() -> None:
    """Somebody puts an object of another library into an event: an error, not its memory address."""
    with pytest.raises(TypeError):
        encode(object())  # type: ignore[arg-type]


def ledger(profile: str) -> list[bytes]:
    """Of forty jobs that preempt, wait, share nodes and come as gangs; some report how far they are."""
    values: list[bytes] = []
    jobs = [
        TraceJob(f"j{i:02}", 3 * i, 10 + 37 * (i * 7 % 11), (1, 2, 4, 8, 1, 12)[i % 6]) for i in range(40)
    ]
    found = Simulation(
        nodes_of("2x4+1x8"), PlacerSettings(profile=profile), Reporting(), jobs, sink=values.append
    )
    while found.step():
        pass
    return values


class Reporting(SteadyWork):
    """Jobs that report how long they are when they come."""

    def __init__(self) -> None:
        super().__init__(Constant())

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        super().admit(job, now_s)
        return JobProgress(job_id=job.job_id, attained_s=0.0, remaining_s=float(job.duration_s))


@pytest.mark.parametrize("profile", ["fifo", "liquid", "srtf", "tiresias", "k8s-default"])
def test_whole_ledgers_hold_only_what_their_constraints_allow(profile: str) -> None:
    """A core constructs facts without validation; a field out of range would stop every reader for good."""
    facts: list[Any] = [fact for value in ledger(profile) for fact in read(value).facts]
    assert len(facts) > 200
    for fact in facts:
        found = checked_json(REGISTRY[fact.type], bytes(fact.data))
        assert encode(found) == bytes(fact.data), "of the very types that the fields have"
