"""Telemetry as nodes write it, for tests of those who read windows of it."""

from collections.abc import Iterable, Iterator

import numpy as np

from penstock.log.port import Headers, Message, Partition
from penstock.model.inputs.external_events import TelemetrySampled
from penstock.model.schema.topics import Topic, node_partition
from penstock.model.wire.envelope import Envelope, to_wire


def sample(node_id: str = "n1", task_id: str | None = "a.1.w0", **values: float) -> TelemetrySampled:
    """Of a task, or with `task_id=None` of the node as a whole."""
    return TelemetrySampled(node_id=node_id, task_id=task_id, at_ms=0, **values)  # type: ignore[arg-type]


def message(event_id: str, event: TelemetrySampled, value: bytes | None = None) -> Message:
    """As a node-reporter appends it; `value` stands for what a broken one writes."""
    headers, body = to_wire(Envelope(id=event_id, source="/n", time_ms=0, data=event))
    partition = Partition(Topic.TELEMETRY, node_partition(event.node_id))
    return Message(partition, body if value is None else value, headers, event.node_id.encode())


def garbage(node_id: str) -> Iterator[Message]:
    """What a broken or forged reporter may write: no event, another one, no type, an odd header, nothing."""
    whole = message("g0", sample(node_id, step_ms=1.0))
    without_id: Headers = tuple(pair for pair in whole.headers if pair[0] != "ce_id")
    yield message("g1", sample(node_id, step_ms=1.0), b'{"step_ms": NaN}')
    yield message("g2", sample(node_id, step_ms=1.0), b"\xff")
    yield message("g3", sample(node_id, step_ms=1.0), b"")
    yield Message(whole.partition, whole.value, (("ce_type", b"\xff\xfe"),))
    yield Message(whole.partition, whole.value, ())
    yield Message(whole.partition, b"x" * 100_000, whole.headers)
    yield Message(whole.partition, whole.value, without_id)


def load(seed: int, count: int, nodes: Iterable[str], tasks: int = 3) -> Iterator[Message]:
    """So many samples of these nodes, with some that nothing reads; every tenth is sent twice."""
    names, random = list(nodes), np.random.default_rng(seed)
    for number in range(count):
        task = random.integers(-1, tasks)
        values = {
            "step_ms": 50 + 10 * random.random(),
            "gpu_utilisation_percent": 100 * random.random(),
            "cpu_stalled_percent": 100 * random.random(),
            "memory_bandwidth_percent": 120 * random.random(),
            "loss": random.random(),
        }
        chosen = {name: value for name, value in values.items() if random.random() < 0.5}
        event = sample(str(random.choice(names)), None if task < 0 else f"j{task}.1.w0", **chosen)
        found = message(f"s{seed}-{number}", event)
        yield found
        if number % 10 == 0:
            yield found
