"""Small clusters and traces for the simulator's tests."""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.topics import Topic
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Constant
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.nodes import Latency
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.services.port import Input
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob


class Listener:
    """A service that notes what it hears, batch by batch, and publishes the same each time."""

    writes = Topic.PROPOSALS

    def __init__(self, published: Sequence[Any] = ()) -> None:
        self.batches: list[list[Input]] = []
        self._published = published

    def answer(self, inputs: Sequence[Input]) -> Sequence[Any]:
        self.batches.append(list(inputs))
        return self._published


def job(job_id: str, submit_s: float, duration_s: float, gpus: int = 1) -> TraceJob:
    return TraceJob(job_id, submit_s, duration_s, gpus)


def simulation(
    jobs: Iterable[TraceJob],
    profile: str = "fifo",
    cluster: str = "1x4",
    options: Options | None = None,
    sink: Any = None,
    **settings: Any,
) -> Simulation:
    """With every invariant checked after every record."""
    options = (options or Options())._replace(check_every_step=True)
    return Simulation(
        nodes_of(cluster),
        PlacerSettings(profile=profile, **settings),
        SteadyWork(Constant()),
        jobs,
        options,
        sink,
    )


def ends(found: Simulation) -> dict[str, float]:
    """Runs to the end: job id → end, seconds."""
    while found.step():
        pass
    return {job_id: life.end_s for job_id, life in found.meter.lives.items() if life.end_s is not None}


BUSY = [job(f"j{i:02}", 3 * i, 10 + 37 * (i * 7 % 11), (1, 2, 4, 8, 1, 1)[i % 6]) for i in range(40)]
SLOW_NODES = Options(latency=Latency(start_s=5, stop_s=2))
CLUSTER = "2x4+1x8"


def watched(
    jobs: Iterable[TraceJob], profile: str, cluster: str = CLUSTER, options: Options | None = None
) -> tuple[Simulation, Timeline]:
    """A run to its end, and the timeline of its ledger."""
    timeline = Timeline()
    found = simulation(jobs, profile, cluster, options, timeline.take)
    ends(found)
    return found, timeline
