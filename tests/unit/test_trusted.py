"""What is written without a serializer and built without validation: the same bytes, the same values."""

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from infra.codegen.schemas import ROOT
from penstock.model.codec import decode, encode
from penstock.model.external_events import JobProgress, TaskStarted
from penstock.model.ledger_events import PlacerSettings
from penstock.model.trusted import trusted
from penstock.model.types import ResourceVector
from penstock.simulator.engine import Simulation
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from penstock.simulator.truths.steady import SteadyWork
from penstock.simulator.truths.truth import Constant

GOLDEN = sorted((ROOT / "schemas/examples").glob("*.json"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_events_are_written_as_their_models_write_them(file: Any) -> None:
    """An auditor writes an event with the model's own serializer: the chain of hashes must hold."""
    event = decode(file.stem, file.read_bytes())
    assert encode(event) == event.__pydantic_serializer__.to_json(event)


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.text(max_size=20))
def test_numbers_and_texts_are_written_as_their_models_write_them(seconds: float, detail: str) -> None:
    """A job reports 1e22 seconds, a node a detail in any script."""
    told = JobProgress(job_id="j", attained_s=seconds)
    assert encode(told) == told.__pydantic_serializer__.to_json(told)  # type: ignore[arg-type]
    settings = PlacerSettings(profile="fifo")
    named = settings.model_copy(update={"profile": detail})
    assert encode(named) == named.__pydantic_serializer__.to_json(named)  # type: ignore[arg-type]


def test_a_share_that_is_whole_is_not_written() -> None:
    """Ledgers from before shares existed and of today have the same bytes where nobody shares."""
    assert b"gpu_share_milli" not in encode(ResourceVector(gpus=1))  # type: ignore[arg-type]
    assert b'"gpu_share_milli":500' in encode(ResourceVector(gpus=1, gpu_share_milli=500))  # type: ignore[arg-type]


def test_only_models_are_written() -> None:
    """Somebody puts an object of another library into an event: an error, not its memory address."""
    with pytest.raises(TypeError):
        encode(object())  # type: ignore[arg-type]


def test_a_trusted_value_is_the_validated_one() -> None:
    """It compares, prints, copies and refuses changes like any other."""
    fields = {"node_id": "n1", "task_id": "j.1.w0", "token": 7, "pid": 9, "started_ms": 12}
    right, found = TaskStarted(**fields), trusted(TaskStarted, **fields)
    assert (found, repr(found), found.model_fields_set) == (right, repr(right), right.model_fields_set)
    assert found.model_copy(update={"pid": 10}) == TaskStarted(**{**fields, "pid": 10})
    with pytest.raises(ValueError, match="frozen"):
        found.pid = 3  # type: ignore[misc]


def ledger(profile: str) -> list[bytes]:
    """Of forty jobs that preempt, wait, share nodes and come as gangs; some tell how far they are."""
    values: list[bytes] = []
    jobs = [
        TraceJob(f"j{i:02}", 3 * i, 10 + 37 * (i * 7 % 11), (1, 2, 4, 8, 1, 12)[i % 6]) for i in range(40)
    ]
    found = Simulation(
        nodes_of("2x4+1x8"), PlacerSettings(profile=profile), Telling(), jobs, sink=values.append
    )
    while found.step():
        pass
    return values


class Telling(SteadyWork):
    """Jobs that tell how long they are when they come."""

    def __init__(self) -> None:
        super().__init__(Constant())

    def admit(self, job: TraceJob, now_s: float) -> JobProgress | None:
        super().admit(job, now_s)
        return trusted(JobProgress, job_id=job.job_id, attained_s=0.0, remaining_s=job.duration_s)


def validated(model: type[BaseModel], /, **fields: Any) -> BaseModel:
    """In place of `trusted`: judges every field, and that all are there, in order and of their types."""
    value = model.model_validate(fields)
    assert list(fields) == list(model.model_fields), model
    for name, given_value in fields.items():
        kept = getattr(value, name)
        assert kept == given_value, (model, name, given_value)
        assert type(kept) is type(given_value), (model, name, given_value)
    return value


@pytest.mark.parametrize("profile", ["fifo", "liquid", "srtf", "tiresias", "k8s-default"])
def test_whole_ledgers_are_the_same_without_trust(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody adds a field to an event and forgets a place that builds it without validation."""
    right = ledger(profile)
    for module in list(sys.modules.values()):
        if getattr(module, "trusted", None) is trusted and module.__name__ != __name__:
            monkeypatch.setattr(module, "trusted", validated)
    assert ledger(profile) == right
