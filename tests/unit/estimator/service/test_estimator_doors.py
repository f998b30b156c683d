"""Whatever stands on the jobs topic or the ledger's: the estimator answers or skips, and never falls over."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from penstock.log.port import Headers, Partition, Record
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.model.wire.codec import as_written
from penstock.model.wire.envelope import from_wire
from penstock.runtime.settings import Settings
from penstock.runtime.tracing.tracer import Tracing
from penstock_services.estimator.core.fold.state import State
from penstock_services.estimator.shell.service import Estimator
from tests.support.log.memory_log import MemoryBroker, MemoryLog

GENERATED = 1_500
GOOD = as_written(
    JobSubmitted(
        job_id="job-1",
        spec=JobSpec(command=("train",), model="m", batch_size=8, resources=ResourceRequest(gpus=1, cores=2)),
    )
)
TYPE = "penstock.job.submitted.v1"
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    16,
    17,
    1 << 30,
    (1 << 30) + 1,
    1 << 53,
    -(1 << 63),
    10**30,
    0.5,
    1e308,
    "",
    "x",
    "é" * 200,
    "\0",
    "NaN",
    [],
    ["a"],
    [""],
    ["\0"],
    {},
    {"a": 1},
    {"": ""},
    ["x" * 9_000],
    ["x"] * 600,
]
RAW = [
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"job_id": NaN}',
    b"\xff\xfe",
    b"[" * 20_000,
    b'{"spec":' * 5_000,
    b"1e999",
    b"x" * 70_000,
    msgspec.json.encode(GOOD) + b" x",
    msgspec.json.encode(GOOD).replace(b"8", b"Infinity"),
]


def mutated(rng: random.Random) -> bytes:
    """A submission with up to three fields changed, removed or added, at any depth; or something else
    entirely."""
    if rng.random() < 0.1:
        return rng.choice(RAW)
    event: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(GOOD))
    for _ in range(rng.randrange(4)):
        place = rng.choice(
            [event, event.get("spec"), (event.get("spec") or {}).get("resources")]
            if isinstance(event.get("spec"), dict)
            else [event]
        )
        if not isinstance(place, dict) or not place:
            continue
        name = rng.choice([*place, "unknown"])
        if rng.random() < 0.2:
            place.pop(name, None)
        else:
            place[name] = rng.choice(VALUES)
    return msgspec.json.encode(event)


def headers(rng: random.Random) -> Headers:
    found = [("ce_specversion", b"1.0"), ("ce_id", b"e-1"), ("ce_source", b"/x"), ("ce_type", TYPE.encode())]
    if rng.random() < 0.2:
        bad = [
            b"",
            b"\xff",
            b"x" * 15_000,
            b"penstock.job.submitted.v9",
            b"penstock.job.submitted.vx",
            b"penstock.job.ended.v1",
        ]
        name = rng.choice(["ce_specversion", "ce_id", "ce_type", "ce_time", "traceparent", "causationid"])
        found = [pair for pair in found if pair[0] != name] + [(name, rng.choice(bad))]
    return tuple(found)


@pytest.mark.parametrize("seed", [1, 2])
def test_generated_submissions_are_answered_or_skipped(seed: int) -> None:
    """Producers of all ages and moods write to the topic; nothing but a valid estimate ever comes out."""
    rng, broker = random.Random(seed), MemoryBroker()
    estimator = Estimator(Settings(log_url="x"), MemoryLog(broker), Tracing())
    broker.create({Topic.ESTIMATES: 1})
    seen: Counter[str] = Counter()
    for offset in range(GENERATED):
        record = Record(Partition(Topic.JOBS, 0), offset, mutated(rng), headers(rng), None, 0)
        submission = estimator._submission(record)
        if submission is not None:
            estimator._prepare([submission[0].spec])
        message = (
            None
            if submission is None
            else estimator._message(submission[0].job_id, submission[0].spec, "e-1", None)
        )
        seen["skipped" if message is None else "answered"] += 1
        if message is not None:
            broker.append("estimator", [message])  # raises when it is larger than a log takes
            envelope = from_wire(message.headers, message.value, Topic.ESTIMATES)
            assert isinstance(envelope.data, JobEstimated)
    assert min(seen.values()) > GENERATED // 10  # the generator makes both kinds


def test_garbage_on_the_ledgers_topic_is_void() -> None:
    """Somebody with the wrong rights wrote there: no record of theirs extends the chain."""
    rng, ledger = random.Random(3), State(Topic.JOBS, 0)
    for _ in range(1_000):
        ledger.fold(mutated(rng))
    assert (ledger.void, ledger.seq, len(ledger.live)) == (1_000, 0, 0)
